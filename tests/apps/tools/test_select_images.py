"""The choice of images to label, with a model whose scores and features follow from the color of an image."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, POSITIVES, color, expected, make_run
from helpers.commands import csv_rows
from PIL import Image
from scipy.stats import entropy

from mlmoe_jax.apps.tools.predict_files import choose_target, predict_files
from mlmoe_jax.inference.predictor import Predictor

COLORS = {"a": (100, 100, 100), "b": (255, 0, 0), "c": (0, 130, 0), "d": (0, 0, 150), "e": (250, 5, 0), "f": (90, 0, 0)}


@pytest.fixture
def select(color_folder, tmp_path, monkeypatch):
    """A function that selects among images of one color; the table of the run has labels of `f`, and none known of `a`.

    It returns the rows of the CSV.
    """
    run = make_run()
    (tmp_path / "photos").mkdir()
    for name, rgb in COLORS.items():
        Image.fromarray(color(*rgb)).save(tmp_path / "photos" / f"{name}.png")
    (tmp_path / "photos" / "labels.csv").write_text(f"image,{','.join(NAMES)}\na.png,,,,\nf.png,1,,0,0\n")
    data = run.config.data
    data.name, data.root, data.table, data.label_column = "csv", str(tmp_path / "photos"), "labels.csv", ""
    data.val_split, data.test_splits = "", ()

    def command(method, count, images=("photos",), output=None, **options):
        target = choose_target(output, color_folder, select=True)
        predict_files(lambda: Predictor(run, HALVES), images, target, select=method, count=count, **options)
        return csv_rows(output or "run/selected.csv")

    command.data = data
    return command


def test_the_most_uncertain_images_without_labels_come_first(select):
    rows = select("uncertain", 3)
    scores = {name: np.array(expected(*rgb)) for name, rgb in COLORS.items() if name != "f"}
    weights = (np.array(POSITIVES) + 1) ** -0.5
    uncertainty = {name: np.average(entropy([p, 1 - p], base=2), weights=weights) for name, p in scores.items()}
    order = sorted(uncertainty, key=uncertainty.__getitem__, reverse=True)[:3]
    assert order[0] == "a", "known to the table, but without a label"
    assert [row["image"] for row in rows] == [f"photos/{name}.png" for name in order]
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    np.testing.assert_allclose(
        [float(row["uncertainty"]) for row in rows], [uncertainty[name] for name in order], atol=1e-6
    )
    assert list(rows[0]) == ["image", "rank", "uncertainty", "distance", "labels", "error", *NAMES]
    assert rows[0]["labels"] == "red;green;blue;dark"


def test_diverse_images_are_far_from_labeled_ones_and_from_one_another(select):
    rows = select("diverse", 3)
    # red `f` has a label: green and blue are at right angles to it and to each other, then comes gray
    assert [row["image"] for row in rows] == [f"photos/{name}.png" for name in "cda"]
    far = [2**0.5, 2**0.5, (2 - 2 / 3**0.5) ** 0.5]
    np.testing.assert_allclose([float(row["distance"]) for row in rows], far, atol=1e-5)
    assert rows[0]["distance"] == "1.414214"


def test_both_weights_the_distance_by_the_uncertainty(select):
    assert select("both", 1)[0]["image"] == "photos/a.png"


def test_without_the_data_set_every_image_counts_and_a_line_says_so(select, capsys):
    select.data.root = "gone"
    assert len(select("both", 6, ("photos", "photos/a.png"))) == 6
    assert "all images count as unlabeled, because the data set of the run cannot be opened" in capsys.readouterr().err


def test_labels_are_known_although_another_image_of_the_data_set_is_gone(select):
    table = Path("photos/labels.csv")
    table.write_text(table.read_text() + "gone.png,1,0,0,0\n")
    assert {row["image"] for row in select("uncertain", 5)} == {f"photos/{name}.png" for name in "abcde"}


def test_more_images_than_can_be_chosen_are_refused_before_and_after_they_are_read(
    select, refusal, capsys, monkeypatch
):
    Path("photos/g.png").write_text("not an image")
    assert {row["image"] for row in select("both", 5)} == {f"photos/{name}.png" for name in "abcde"}
    assert "left out: 1 image that cannot be read" in capsys.readouterr().err
    Path("run/selected.csv").unlink()
    assert "--count=6 is more than the 5 images without labels that can be chosen" in refusal(select, "both", 6)
    monkeypatch.setattr(Predictor, "embed", None)
    assert "--count=7 is more than the 6 images without labels" in refusal(select, "both", 7)
    assert not Path("run/selected.csv").exists()


def test_json_lines_and_best_labels_have_the_values_too(select):
    select("uncertain", 1, output="p.jsonl")
    row = json.loads(Path("p.jsonl").read_text())
    assert " ".join(row) == "image rank uncertainty distance labels scores"
    assert (row["rank"], row["distance"]) == (1, None)
    (row,) = select("both", 1, top_k=1)
    assert " ".join(row) == "image rank uncertainty distance error label_1 score_1"
