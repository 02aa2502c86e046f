"""Images in a cache: the same batches as without one, and errors of a full disk and of damage."""

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.config import apply_overrides, default_config, validate
from mlmoe_jax.data import features
from mlmoe_jax.data.image_cache import with_cache
from mlmoe_jax.data.images import BadImage, ImageFiles
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.split import Split

SIZE, ROWS = 16, 7


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(features, "PART_BYTES", 3 * SIZE * SIZE * 3)  # three images


class CountedFiles(ImageFiles):
    """Files that count how often each is decoded."""

    def __init__(self, folder, names):
        super().__init__(folder, names)
        self.opened = np.zeros(len(names), int)

    def open(self, row, *decoding):
        self.opened[row] += 1
        return super().open(row, *decoding)


def write_image(path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    Image.fromarray(draw.integers(0, 256, (20 + seed, 37, 3), np.uint8)).save(path, "JPEG")


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for row in range(ROWS):
        write_image(folder / f"{row}.jpg", row)
    return folder


def split_of(folder: Path, name: str = "train") -> Split:
    names = [f"{row}.jpg" for row in range(ROWS)]
    labels = np.eye(ROWS, 3, dtype=np.int8)
    return Split(name, ("a", "b", "c"), labels, names, CountedFiles(folder, names))


def config_of(cache: str = "disk", **overrides):
    keys = {"data__image_size": str(SIZE), "data__threads": "2", "data__workers": "0", "data__cache": cache}
    pairs = [(key.replace("__", "."), text) for key, text in {**keys, **overrides}.items()]
    return apply_overrides(default_config(), pairs)


def loaded(config, split: Split, augment) -> list[dict[str, np.ndarray]]:
    """Return the batches of three epochs of training, or those of an evaluation."""
    loader = build_loader(config.data, split, batch_size=4, augment=augment, seed=1)
    return list(itertools.islice(loader, 6))


def assert_same(batches, expected) -> None:
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        for name in other:
            np.testing.assert_array_equal(batch[name], other[name])


AUGMENTED = {"augment__flip": "true", "augment__cutout": "0.5", "augment__shift": "0.3"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**AUGMENTED, "augment__randaugment": "uda"},
        {"data__resize": "crop", **AUGMENTED},
        {"augment__geometry": "multi_scale_crop", "augment__margin": "8"},
        {"data__reduced_decoding": "true"},
    ],
)
def test_batches_are_those_without_a_cache_and_each_image_is_decoded_once(photos, settings):
    config = config_of(**settings)
    validate(config)
    for augment in (config.augment, None):
        (cached,) = with_cache([(split := split_of(photos), augment)], config.data)
        assert_same(loaded(config, cached, augment), loaded(config, split_of(photos), augment))
        assert split.images.opened.max() <= 1, "nothing is decoded again"
        assert len(cached.cached[0]["image"]) == SIZE + (config.augment.margin if augment else 0)


def test_a_cache_on_disk_serves_later_runs_on_the_same_files_and_size(photos, capsys):
    config = config_of()

    def opened(config=config) -> int:
        with_cache([(split := split_of(photos), config.augment)], config.data)
        return int(split.images.opened.sum())

    assert opened() == ROWS
    size = f"{ROWS} images, 0.0 MB in {os.environ['MLMOE_CACHE']}/images/"
    assert f"cache of train: {size}" in capsys.readouterr().err
    assert opened() == 0
    assert ", already there" in capsys.readouterr().err
    (part,) = Path(os.environ["MLMOE_CACHE"]).rglob("00001.read.npy")
    part.unlink()
    assert opened() == 3, "the part that an interruption left out"
    assert opened(config_of(data__image_size="12")) == ROWS
    assert opened(config_of(data__exif="ignore")) == ROWS
    os.utime(photos / "3.jpg", (1, 1))
    assert opened() == ROWS, "a file has changed"


def test_splits_with_the_same_images_share_a_table(photos):
    config = config_of()
    first, second = split_of(photos), split_of(photos, "val")
    with_cache([(first, config.augment), (second, None)], config.data)
    assert (first.images.opened.sum(), second.images.opened.sum()) == (ROWS, 0)


def test_unreadable_images_are_left_out_or_refused_as_without_a_cache(photos, refusal):
    (photos / "2.jpg").write_bytes(b"\xff\xd8 no image")
    skipping = config_of(data__bad_images="skip")
    (cached,) = with_cache([(split_of(photos), None)], skipping.data)
    found = loaded(skipping, cached, None)
    assert_same(found, loaded(skipping, split_of(photos), None))
    assert found[0]["mask"].tolist() == [1, 1, 0, 1]
    strict = config_of()
    assert "2.jpg as an image" in refusal(with_cache, [(split_of(photos), None)], strict.data, error=BadImage)


def test_images_that_do_not_fit_are_refused_before_any_is_read(photos, refusal, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Disk", (), {"free": 3_000}))
    config, split = config_of(), split_of(photos)
    sentence = refusal(with_cache, [(split, config.augment)], config.data)
    assert split.images.opened.sum() == 0
    assert sentence.startswith("the images of data.cache=disk need 0.0 MB in ")
    assert sentence.endswith("; let MLMOE_CACHE name a larger disk, or set data.cache=none")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"augment__geometry": "multi_scale_crop"}, "augment.geometry=multi_scale_crop crops each at its own"),
        ({"data__cache_features": "float32"}, "data.cache_features reads each image only once: set data.cache=none"),
    ],
)
def test_a_cache_that_would_help_nothing_is_refused(refusal, settings, told):
    assert told in refusal(validate, config_of(**settings))
