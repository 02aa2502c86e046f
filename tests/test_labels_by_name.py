"""The page docs/labels-by-name.md, followed from a list of names to a trained model, with a small image-text model."""

import csv
import shlex
import subprocess
import sys

import numpy as np
import pytest
from helpers.commands import csv_rows
from helpers.documents import blocks
from helpers.paths import REPOSITORY
from helpers.text_towers import use_twin
from PIL import Image

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


def follow(section):
    """Run the commands of a section of the page."""
    commands = [line for block in blocks(PAGE, "bash", section) for line in block.text.splitlines() if line]
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "mlmoe", command
        assert main(arguments) == 0, command
    return len(commands)


@pytest.mark.budget(90)
def test_the_page_leads_from_a_list_of_names_to_a_model(place):
    assert follow("Vectors") == 1
    assert follow("Predictions") == 1
    rows = csv_rows("suggested.csv")
    assert list(rows[0]) == ["image", "labels", "error", *NAMES, *(f"rank {name}" for name in NAMES)]
    ranks = np.array([[float(row[f"rank {name}"]) for name in NAMES] for row in rows])
    np.testing.assert_allclose(ranks.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(ranks.std(axis=0), 1, atol=1e-3)
    assert all(row["labels"] for row in rows)

    with open("photos/labels.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "labels"])
        table.writerows([f"{number}.png", "boat" if number % 2 else "boat;crane"] for number in range(56))
    assert follow("Corrections") == 5
    (before, after) = (csv_rows(file) for file in ("suggested.csv", "labels.csv"))
    scores = [[[float(row[name]) for name in NAMES] for row in table] for table in (before, after)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)
    assert "rank boat" not in after[0], "thresholds are fitted"
    for command in ("calibrate", "report"):
        arguments = ["--config.thresholds.split=train"] if command == "calibrate" else []
        assert main([command, "--workdir=runs/by_name", *arguments]) == 0
    for command in ("export --format=onnx --output=exported", "push --repo=ada/names --output=shared"):
        assert main([*command.split(), "--workdir=runs/by_name"]) == 0
    for folder in ("runs/by_name", "shared"):
        assert main(["predict", f"--workdir={folder}", "--images", "photos", f"--output={folder[:4]}.csv"]) == 0
    assert csv_rows("shar.csv") == csv_rows("runs.csv")
    selecting = ["--select=both", "--count=3", "--output=next.csv"]
    assert main(["predict", "--workdir=runs/by_name", "--images", "photos", *selecting]) == 0
    assert len(csv_rows("next.csv")) == 3
    assert follow("Few labels") == 1


def test_prediction_with_vectors_reads_no_tokenizer(place):
    """Also if the packages of the extra `text` are not installed, and without the weights of the text tower."""
    program = f"""
import sys
from pathlib import Path
import pytest
from helpers.text_towers import use_twin
from mlmoe_jax.main import main
sys.modules |= dict.fromkeys(("tokenizers", "sentencepiece"))  # their import is an error
with pytest.MonkeyPatch.context() as patch:
    use_twin(patch, Path("cache"), "siglip2", {BACKBONE!r})
    from mlmoe_jax.pretrained import text_towers
    patch.setattr(text_towers, "load_text_tower", None)
    if not Path("labels.safetensors").exists():
        sys.exit(5)
    sys.exit(main(["predict", "--names=labels.safetensors", "--images", "photos", "--output=alone.csv"]))
"""
    if not (place / "labels.safetensors").exists():
        follow("Vectors")
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(csv_rows("alone.csv")) == IMAGES
