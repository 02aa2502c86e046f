"""The page docs/labels-by-name.md, followed from a list of names to a trained model, with a small image-text model."""

import csv
import shlex
import sys

import numpy as np
import pytest
from helpers.commands import csv_rows
from helpers.documents import blocks
from helpers.paths import REPOSITORY
from helpers.text_towers import use_twin
from PIL import Image

from mlmoe_jax.inference import text_encoder
from mlmoe_jax.main import main

PAGE = REPOSITORY / "docs" / "labels-by-name.md"
NAMES = ["boat", "crane", "traffic light"]
IMAGES = 64
BACKBONE = "siglip2_vitb16_256"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images and the list of names, where the backbone of the page is small."""
    folder = tmp_path_factory.mktemp("by_name")
    (folder / "photos").mkdir()
    draw = np.random.default_rng(0)
    for number in range(IMAGES):
        pixels = draw.integers(0, 256, (28, 28, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    (listed,) = blocks(PAGE, "text", "A list of names")
    (folder / "labels.txt").write_text(listed.text)
    with pytest.MonkeyPatch.context() as patch:
        use_twin(patch, folder / "cache", "siglip2", BACKBONE)
        patch.chdir(folder)
        yield folder


def follow(*commands):
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "mlmoe", command
        assert main(arguments) == 0, command


def commands_of(section):
    """Return the commands of a section of the page."""
    return [line for block in blocks(PAGE, "bash", section) for line in block.text.splitlines() if line]


@pytest.fixture(scope="module")
def imported(place):
    """The run that the page leads to. Its predictions need no text tower, and no package of the extra `text`."""
    follow(*commands_of("Vectors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "load_text_tower", None)
        for package in ("tokenizers", "sentencepiece"):
            patch.setitem(sys.modules, package, None)  # their import is an error
        follow(*commands_of("Predictions"))
    with open("photos/labels.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "labels"])
        table.writerows([f"{number}.png", "boat" if number % 2 else "boat;crane"] for number in range(56))
    follow(*commands_of("Corrections"))
    return "runs/by_name"


@pytest.mark.budget(60)
def test_the_page_leads_from_a_list_of_names_to_a_model(imported):
    before, after = (csv_rows(file) for file in ("suggested.csv", "by_name.csv"))
    assert len(before) == IMAGES
    assert list(before[0]) == ["image", "labels", "error", *NAMES, *(f"rank {name}" for name in NAMES)]
    ranks = np.array([[float(row[f"rank {name}"]) for name in NAMES] for row in before])
    np.testing.assert_allclose(ranks.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(ranks.std(axis=0), 1, atol=1e-3)
    above = [[name for name in NAMES if float(row[f"rank {name}"]) >= 1.5] for row in before]
    assert [set(filter(None, row["labels"].split(";"))) for row in before] == list(map(set, above))
    assert not all(above)
    scores = [[[float(row[name]) for name in NAMES] for row in table] for table in (before, after)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)
    assert "rank boat" not in after[0], "thresholds are fitted"


@pytest.mark.slow
def test_the_model_takes_the_commands_of_every_other(imported):
    follow(
        f"mlmoe calibrate --workdir={imported} --config.thresholds.split=train",
        f"mlmoe report --workdir={imported}",
        f"mlmoe export --workdir={imported} --format=onnx --output=exported",
        f"mlmoe push --workdir={imported} --repo=ada/names --output=shared",
        f"mlmoe predict --workdir={imported} --images=photos --output=own.csv",
        "mlmoe predict --workdir=shared --images=photos --output=shared.csv",
        f"mlmoe predict --workdir={imported} --images=photos --select=both --count=3 --output=next.csv",
    )
    assert csv_rows("shared.csv") == csv_rows("own.csv")
    assert len(csv_rows("next.csv")) == 3


@pytest.mark.slow  # the same fit as in tests/training/test_logistic_fit.py
def test_few_labels_are_fitted_from_the_vectors(imported):
    follow(*commands_of("Few labels"))
