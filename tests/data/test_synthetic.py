import pickle

import numpy as np
import pytest
from helpers.tables import data_settings

from mlmoe_jax.data.sources import synthetic
from mlmoe_jax.data.sources.open import open_split


def open_synthetic(labels, split):
    return open_split(data_settings("synthetic", labels=labels), split)


def decoded(image: np.ndarray, labels: int) -> set[int]:
    """Return the labels that an image shows, by the mean color of each tile."""
    tiles = image.astype(float).reshape(4, 16, 4, 16, 3).mean(axis=(1, 3)).reshape(16, 3)
    colors = synthetic._color(np.arange(-(-labels // 16)), -(-labels // 16))
    found = set()
    for place, tile in enumerate(tiles):
        if np.abs(tile - 128).max() > 4:  # not gray
            color = int(np.abs(colors - tile).max(axis=1).argmin())
            found.add(place + 16 * color)
    return found


@pytest.mark.parametrize("labels", [16, 100, 20_000])
def test_every_image_shows_its_labels(labels):
    split = open_synthetic(labels, "val")
    assert split.labels.shape == (500, labels)
    assert split.labels[:].sum(axis=1).tolist() == [3] * 500
    gray = 0
    for row in range(0, 500, 25):
        shown = set(np.flatnonzero(split.labels[row]).tolist())
        found = decoded(split.images.read(row), labels)
        assert found <= shown, "a color near gray may be missed, but no other is found"
        gray += len(shown - found)
    assert gray <= 3


def test_labels_are_drawn_evenly():
    positives = open_synthetic(40, "train").labels[:].sum(axis=0)
    place = np.arange(40) % 16
    for of in range(16):
        among = positives[place == of]
        assert among.sum() == pytest.approx(2_000 * 3 / 16, rel=0.2)
        assert among.max() < 1.6 * among.min()


def test_splits_are_disjoint_streams_that_never_change():
    train, val = open_synthetic(100, "train"), open_synthetic(100, "val")
    assert not np.array_equal(train.labels[:500], val.labels)
    again = pickle.loads(pickle.dumps(train.images))
    for row in (0, 7, 1_999):
        np.testing.assert_array_equal(again.read(row), train.images.read(row))
    assert not np.array_equal(train.images.read(0), train.images.read(1))
    assert (len(train), len(val), len(open_synthetic(100, "test"))) == (2_000, 500, 500)
