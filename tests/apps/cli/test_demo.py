"""The model and the photographs of the demonstration, by the commands of the README."""

import csv
import importlib.machinery
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.data.images import ImageNames
from mlmoe_jax.main import main
from mlmoe_jax.runs.shared_model import FILES, run_folder

MODEL = "demo:photographs"


def test_the_model_comes_with_the_package():
    folder = run_folder(MODEL)
    names = {path.name for path in folder.path.iterdir()}
    assert names <= set(FILES), "only what a shared model has"
    text = (folder / "config.json").read_text() + (folder / "README.md").read_text()
    assert not any(place in text for place in ("/tmp", "/home"))


def test_photographs_are_labeled(tmp_path, capsys):
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        Image.fromarray(pixels).save(tmp_path / f"{name}.jpg")
    assert main(["--mode=predict", f"--workdir={MODEL}", f"--images={tmp_path}", "--output=-"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [Path(row["image"]).name for row in rows] == ["flower.jpg", "temple.jpg"]
    scores = [float(row[name]) for row in rows for name in row if name not in ("image", "labels", "error")]
    assert len(scores) == 12
    assert all(0 <= score <= 1 for score in scores)


def test_the_cat_of_scikit_image_is_a_cat(capsys):
    if importlib.util.find_spec("skimage") is None:
        pytest.skip("scikit-image, whose photographs these are, is not installed (extra demo)")
    assert main(["--mode=predict", f"--workdir={MODEL}", f"--images={MODEL}", "--output=-"]) == 0
    found = {Path(row["image"]).stem: row for row in csv.DictReader(capsys.readouterr().out.splitlines())}
    assert found["chelsea"]["labels"] == "cat"
    assert "person" in found["astronaut"]["labels"].split(";")
    assert found["coffee"]["labels"] == ""


def test_photographs_are_found_in_scikit_image(tmp_path, monkeypatch, refusal):
    spec = importlib.machinery.ModuleSpec("skimage", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "skimage" else None)
    assert "`pip install scikit-image`" in refusal(find_images, [MODEL])
    (tmp_path / "data").mkdir()
    for name in ("chelsea.png", "page.png"):  # the second one is no photograph
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "data" / name)
    assert list(ImageNames(find_images([MODEL]).images)) == [str(tmp_path / "data" / "chelsea.png")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "`pip install scikit-image`" in refusal(find_images, [MODEL])
