import os
from pathlib import Path

import pytest
from etils.epath import testing as epath_testing
from helpers.packing import write_voc

from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture
def small_voc(tmp_path, monkeypatch):
    """A root with a VOC 2012 folder to pack in shards of 3 images."""
    monkeypatch.setattr("mlmoe_jax.apps.tools.pack.SHARD_IMAGES", 3)
    write_voc(tmp_path / "voc")
    return tmp_path / "voc"


@pytest.fixture
def color_folder(tmp_path, monkeypatch):
    """A run folder in the working directory, for a model whose scores follow from the color of an image."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.write_json("config.json", {})
    (tmp_path / "run" / "checkpoints").mkdir()
    return folder


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Map gs:// addresses to a folder that, like an object store, supports neither appending nor renaming.

    The value is a list of the shards that were copied to the store or from it.
    """
    store = tmp_path / "store"
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))

    def here(path) -> str:
        return os.fspath(path).replace("gs://", f"{store}/")

    def mapped(original, path, *arguments, **options):
        return original(here(path), *arguments, **options)

    def open_file(original, path, mode):
        assert "a" not in mode
        Path(here(path)).parent.mkdir(parents=True, exist_ok=True)
        if os.fspath(path).startswith("gs://") and os.fspath(path).endswith(".arrayrecord"):
            copies.append(str(path))
        return original(here(path), mode)

    def copy(original, path, target, overwrite):
        copies.append(str(target))
        return original(here(path), here(target), overwrite=overwrite)

    def unsupported(*_, **__):
        raise AssertionError("object stores do not support this")

    copies: list[str] = []
    same = dict.fromkeys(("exists", "isdir", "listdir", "makedirs", "mkdir", "remove", "stat"), mapped)
    with epath_testing.mock_epath(**same, open=open_file, copy=copy, rename=unsupported, replace=unsupported):
        yield copies
