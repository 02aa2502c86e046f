"""Thumbnails of images by name, from samples/ or from the data set of the run."""

import io
from dataclasses import replace

import numpy as np
import pytest
from helpers.made_run import NAMES, make_run
from PIL import Image

from mlmoe_jax.apps.report import thumbnails as thumbnails_module
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.report.thumbnails import thumbnails
from mlmoe_jax.apps.tools.compare import ComparedRun
from mlmoe_jax.data.images import ArrayImages, ImageFiles
from mlmoe_jax.data.split import Split
from mlmoe_jax.runs.folder import RunFolder


# ----------------------------------------------------------------------------------------------------------- thumbnails
@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run without samples whose data set has image files, of which 000 is a link out of data.root."""
    root = tmp_path / "data"
    (root / "test").mkdir(parents=True)
    made = make_run(tmp_path / "run", samples=0, data__root=str(root))
    scored = ComparedRun.of(made).splits["test"]
    for n, name in enumerate(scored.ids):
        Image.fromarray(np.full((300, 200, 3), n, np.uint8)).save(root / name)
    (root / "test/000.jpg").rename(tmp_path / "private.jpg")
    (root / "test/000.jpg").symlink_to(tmp_path / "private.jpg")
    split = Split("test", NAMES, scored.codes.copy(), scored.ids.tolist(), ImageFiles(root, scored.ids.tolist()))
    monkeypatch.setattr(thumbnails_module, "open_split", lambda data, name, **how: split)
    return RunFiles(made), scored, split


def test_thumbnails_are_read_from_the_data_set(folder):
    files, scored, _ = folder
    found = thumbnails(files, scored, ["test/007.jpg", "test/003.jpg"])
    assert sorted(found.shown) == ["test/003.jpg", "test/007.jpg"]
    assert found.left_out == []
    shown = Image.open(io.BytesIO(found.shown["test/007.jpg"]))
    assert max(shown.size) == thumbnails_module.SIDE
    assert np.abs(np.asarray(shown).astype(int) - 7).max() <= 2


def test_no_file_outside_the_data_root_is_embedded(folder, monkeypatch):
    files, scored, split = folder
    found = thumbnails(files, scored, ["test/000.jpg", "test/001.jpg"])
    assert list(found.shown) == ["test/001.jpg"]
    assert found.left_out == ["1 images are not shown, since their files are outside data.root."]
    # also for a part of a split, as with data.val_fraction
    part = split.take(np.arange(5), "test")
    monkeypatch.setattr(thumbnails_module, "open_split", lambda data, name, **how: part)
    assert list(thumbnails(files, scored, ["test/000.jpg", "test/001.jpg"]).shown) == ["test/001.jpg"]


def test_other_data_in_the_same_place_are_not_embedded(folder):
    files, scored, split = folder
    split.labels[3, 0] = 1 - np.clip(split.labels[3, 0], 0, 1)
    (RunFolder(files.config.data.root) / "test/004.jpg").write_bytes(b"no image")
    found = thumbnails(files, replace(scored), ["test/003.jpg", "test/004.jpg", "test/005.jpg"])
    assert list(found.shown) == ["test/005.jpg"]
    assert found.left_out == [
        "1 images are not shown, since the data set has no such image with these labels.",
        "1 images are not shown, since they cannot be read.",
    ]


def test_images_in_memory_have_no_path(folder, monkeypatch):
    files, scored, split = folder
    arrays = ArrayImages(np.zeros((len(scored), 8, 8, 3), np.uint8))
    assert arrays.path(0) is None
    memory = Split("test", NAMES, scored.codes, split.ids, arrays)
    monkeypatch.setattr(thumbnails_module, "open_split", lambda data, name, **how: memory)
    assert list(thumbnails(files, scored, ["test/000.jpg"]).shown) == ["test/000.jpg"]
