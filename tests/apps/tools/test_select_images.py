"""The choice of images to label, with a model whose scores and features follow from the color of an image."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, POSITIVES, color, expected, make_run
from PIL import Image
from scipy.stats import entropy

from mlmoe_jax.apps.cli.flags import parse_flags
from mlmoe_jax.apps.tools.acquisition import METHODS
from mlmoe_jax.apps.tools.predict_files import choose_target, predict_files
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.main import main
from mlmoe_jax.runs.folder import RunFolder

COLORS = {"a": (100, 100, 100), "b": (255, 0, 0), "c": (0, 130, 0), "d": (0, 0, 150), "e": (250, 5, 0), "f": (90, 0, 0)}


@pytest.fixture
def select(tmp_path, monkeypatch):
    """A function that selects among images of one color; the table of the run has labels of `f`, and none known of `a`.

    It returns the rows of the CSV.
    """
    folder, run = RunFolder(tmp_path / "run"), make_run()
    folder.write_json("config.json", {})
    (tmp_path / "run" / "checkpoints").mkdir()
    with open(tmp_path / "run" / "label_space.npz", "wb") as file:
        synthetic_label_space(len(NAMES), 1).save(file)
    (tmp_path / "photos").mkdir()
    for name, rgb in COLORS.items():
        Image.fromarray(color(*rgb)).save(tmp_path / "photos" / f"{name}.png")
    (tmp_path / "photos" / "labels.csv").write_text(f"image,{','.join(NAMES)}\na.png,,,,\nf.png,1,,0,0\n")
    data = run.config.data
    data.name, data.root, data.table, data.label_column = "csv", str(tmp_path / "photos"), "labels.csv", ""
    data.val_split, data.test_splits = "", ()
    monkeypatch.setattr(Predictor, "from_run", lambda folder, overrides, checkpoint: Predictor(run, HALVES))
    monkeypatch.chdir(tmp_path)

    def command(method, count, images=("photos",), output=None, **options):
        target = choose_target(output, folder, select=True)
        predict_files(folder, images, target, (), select=method, count=count, **options)
        with open(output or "run/selected.csv", newline="") as file:
            return list(csv.DictReader(file))

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


def test_images_that_cannot_be_read_are_not_chosen(select, refusal, capsys):
    Path("photos/g.png").write_text("not an image")
    assert {row["image"] for row in select("both", 5)} == {f"photos/{name}.png" for name in "abcde"}
    assert "left out: 1 image that cannot be read" in capsys.readouterr().err
    assert "--count=6 is more than the 5 images without labels that can be chosen" in refusal(select, "both", 6)


def test_too_many_images_are_refused_before_any_work(select, refusal, monkeypatch):
    monkeypatch.setattr(Predictor, "embed", None)
    assert refusal(select, "diverse", 6).startswith("--count=6 is more than the 5 images without labels")
    assert not Path("run/selected.csv").exists()


def test_json_lines_and_best_labels_have_the_values_too(select):
    select("uncertain", 1, output="p.jsonl")
    row = json.loads(Path("p.jsonl").read_text())
    assert list(row) == ["image", "rank", "uncertainty", "distance", "labels", "scores"]
    assert (row["rank"], row["distance"]) == (1, None)
    assert list(select("both", 1, top_k=1)[0]) == [
        "image",
        "rank",
        "uncertainty",
        "distance",
        "error",
        "label_1",
        "score_1",
    ]


def test_the_flags_belong_together(refusal, capsys):
    predict = ["predict", "--workdir=runs/a", "--images=photos"]
    for alone in ("--select=both", "--count=3"):
        assert main([*predict, alone]) == 2
        assert capsys.readouterr().err.startswith("error: --select and --count belong together")
    for method in METHODS:
        assert parse_flags([*predict, f"--select={method}", "--count=3"])[0].select == method
    assert "invalid choice" in refusal(parse_flags, [*predict, "--select=random", "--count=3"])
