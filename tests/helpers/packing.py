"""Small data sets to pack, packed ones, and comparisons of them."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.apps.tools import pack as packing
from mlmoe_jax.config import default_config
from mlmoe_jax.data.sources.voc import VOC_CLASSES
from mlmoe_jax.data.split import Split

SIZES = [(50, 30), (30, 50), (64, 64), (20, 20), (300, 31), (31, 47), (92, 60)]  # width, height


def config_of(root="", name="voc2012", **settings) -> ConfigDict:
    """Return a config for packing in this process; `settings` are keys of `data` or `pack`."""
    config = default_config()
    config.data.name, config.data.root, config.data.test_splits = name, str(root), ()
    config.data.workers = 1
    for key, value in settings.items():
        (config.data if key in config.data else config.pack)[key] = value
    return config


def smooth_image(width: int, height: int, seed: int) -> Image.Image:
    """Return a random image without fine detail."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def write_voc(root: Path) -> None:
    """Write a VOC folder with 7 training images, the last one with an EXIF rotation, and 2 validation images."""
    folder = root / "VOC2012"
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "JPEGImages").mkdir()
    names = {"train": [f"t{n}" for n in range(len(SIZES))], "val": ["v0", "v1"]}
    for split, members in names.items():
        for k, label in enumerate(VOC_CLASSES):
            marks = [
                f"{name} {'1' if (row + k) % 5 == 0 else '0' if k == 3 else '-1'}" for row, name in enumerate(members)
            ]
            (folder / "ImageSets" / "Main" / f"{label}_{split}.txt").write_text("\n".join(marks))
        for row, name in enumerate(members):
            exif = Image.Exif()
            exif[0x0112] = 6 if name == "t6" else 1
            smooth_image(*SIZES[row], len(split) * 100 + row).save(folder / "JPEGImages" / f"{name}.jpg", exif=exif)


@functools.cache
def _packed_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "SHARD_IMAGES", 3)
        write_voc(Path(folder, "voc"))
        packing.pack(config_of(Path(folder, "voc")), Path(folder, "out"))
        return files_of(Path(folder, "out"))


def write_packed(folder: Path) -> None:
    """Write the VOC folder of `write_voc` as packed in shards of 3 images."""
    for name, content in _packed_files().items():
        (folder / name).write_bytes(content)


def shard_of(folder: Path, split: str, number: int = 0) -> Path:
    """Return the shard `number` of a split in a folder."""
    (path,) = folder.glob(f"{split}-{number:05d}-*.arrayrecord")
    return path


def files_of(folder) -> dict[str, bytes]:
    """Return the content of each file in a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def assert_same_split(ours: Split, theirs: Split, rows=None) -> None:
    """Assert that two splits have the same names, labels, ids and, at `rows` (default: all), pixels."""
    assert (ours.name, ours.classes) == (theirs.name, theirs.classes)
    assert list(ours.ids) == list(theirs.ids)
    assert ours.labels[:].dtype == np.int8
    np.testing.assert_array_equal(ours.labels, theirs.labels)
    for row in range(len(theirs)) if rows is None else rows:
        np.testing.assert_array_equal(ours.images.read(row), theirs.images.read(row))
