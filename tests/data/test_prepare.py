"""Preparing batches on the device: normalization, and augmentation if a key is given."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.bench import drawn_batch

from mlmoe_jax.config import default_config
from mlmoe_jax.data.augment import augment
from mlmoe_jax.data.prepare import Preprocess, prepare

SIDE = 4
PREPROCESS = Preprocess(SIDE, (0.5, 0.4, 0.3), (0.25, 0.2, 0.1))


def test_prepare_normalizes_each_channel():
    image = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    image[1] = [255, 51, 153]
    ready = prepare({"image": image}, PREPROCESS)
    assert ready.shape == (2, SIDE, SIDE, 3)
    assert ready.dtype == jnp.float32
    np.testing.assert_allclose(ready[0, 0, 0], [-2, -2, -3], rtol=1e-6)
    np.testing.assert_allclose(ready[1, 2, 3], [2, -1, 3], rtol=1e-6)


def test_prepare_augments_with_a_key_only():
    batch, settings, key = drawn_batch(8, SIDE, 3), default_config().augment, jax.random.key(3)
    settings.where, settings.brightness, settings.cutout = "device", 0.5, 0.5
    plain = prepare(batch, PREPROCESS)
    np.testing.assert_array_equal(prepare(batch, PREPROCESS, settings), plain)
    changed = augment(jnp.asarray(batch["image"], jnp.float32), key, settings)
    expected = (np.asarray(changed) / 255 - PREPROCESS.mean) / PREPROCESS.std
    ready = prepare(batch, PREPROCESS, settings, key)
    np.testing.assert_allclose(ready, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(ready - plain).max() > 0.1
