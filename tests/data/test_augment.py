import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.data.augment import augment, brightness, contrast, cutout, shift

H, W = 16, 12
KEY = jax.random.key(0)
STRENGTHS = {"shift": 0.25, "contrast": 0.5, "brightness": 0.5, "cutout": 0.5}
TRANSFORMS = {"shift": shift, "contrast": contrast, "brightness": brightness, "cutout": cutout}


def pictures(count: int, height: int = H, width: int = W) -> jax.Array:
    """Return pictures that all show the same noise, with no two neighbours alike."""
    one = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.float32)
    return jnp.broadcast_to(one, (count, height, width, 3))


def settings(**strengths):
    config = default_config().augment
    for name, strength in strengths.items():
        config[name] = strength
    return config


# ------------------------------------------------------------------------------------------------------ all of them
def test_without_strength_nothing_changes():
    image = pictures(4)
    np.testing.assert_array_equal(augment(image, KEY, settings()), image)
    np.testing.assert_array_equal(shift(image, KEY, 0.0), image)
    np.testing.assert_array_equal(brightness(image, KEY, 0.0), image)
    np.testing.assert_allclose(contrast(image, KEY, 0.0), image, atol=1e-3)


@pytest.mark.parametrize("name", STRENGTHS)
def test_each_is_decided_by_its_key_and_differs_from_image_to_image(name):
    image = pictures(6)
    changed = augment(image, KEY, settings(**{name: STRENGTHS[name]}))
    assert changed.shape == image.shape
    assert changed.dtype == image.dtype
    np.testing.assert_array_equal(augment(image, KEY, settings(**{name: STRENGTHS[name]})), changed)
    other = augment(image, jax.random.key(1), settings(**{name: STRENGTHS[name]}))
    assert np.any(np.asarray(other) != changed)
    assert len(np.unique(np.asarray(changed).reshape(6, -1), axis=0)) > 3, "the same picture six times"
    assert 0 <= changed.min() <= changed.max() <= 255


def test_the_settings_name_what_is_applied():
    image = pictures(3)
    keys = jax.random.split(KEY, 4)
    for key, (name, strength) in zip(keys, STRENGTHS.items(), strict=True):
        alone = augment(image, KEY, settings(**{name: strength}))
        np.testing.assert_array_equal(alone, TRANSFORMS[name](image, key, strength))
    every = image
    for key, (name, strength) in zip(keys, STRENGTHS.items(), strict=True):
        every = TRANSFORMS[name](every, key, strength)
    together = augment(image, KEY, settings(**STRENGTHS))
    np.testing.assert_array_equal(together, every)
    compiled = jax.jit(lambda image, key: augment(image, key, settings(**STRENGTHS)))(image, KEY)
    np.testing.assert_allclose(compiled, together, atol=1e-3)


# ----------------------------------------------------------------------------------------------------------- shift
def test_a_shift_moves_whole_pixels_and_repeats_borders():
    image = pictures(200)
    moved, one = np.asarray(shift(image, KEY, 0.25)), np.asarray(image[0])
    padded = np.pad(one, ((4, 4), (3, 3), (0, 0)), mode="edge")
    candidates = {
        (down, right): padded[4 - down : 4 - down + H, 3 - right : 3 - right + W]
        for down in range(-4, 5)
        for right in range(-3, 4)
    }
    found = []
    for picture in moved:
        matching = [offset for offset, candidate in candidates.items() if np.array_equal(picture, candidate)]
        assert len(matching) == 1
        found += matching
    down, right = np.transpose(found)
    assert set(down) == set(range(-4, 5))
    assert set(right) == set(range(-3, 4))
    assert len(set(found)) > 40, "both directions are drawn on their own"


# ------------------------------------------------------------------------------------------- brightness, contrast
def test_brightness_multiplies_by_a_factor_within_its_range():
    image = pictures(400) / 4
    factor = np.asarray(brightness(image, KEY, 0.3) / jnp.maximum(image, 1e-9))[:, np.asarray(image[0]) > 1]
    assert np.ptp(factor, axis=1).max() < 1e-5, "one factor an image"
    factor = factor[:, 0]
    assert 0.7 <= factor.min() < 0.71
    assert 1.29 < factor.max() <= 1.3
    assert abs(factor.mean() - 1) < 0.03
    assert np.asarray(brightness(pictures(50), KEY, 1.0)).max() == 255


def test_contrast_scales_about_the_mean_of_the_image():
    level = np.linspace(50, 150, 400)[:, None, None, None]
    centred = np.asarray(pictures(1)[0] - pictures(1).mean()) / 10
    changed = np.asarray(contrast(jnp.asarray(level + centred, jnp.float32), KEY, 0.4))
    np.testing.assert_allclose(changed.mean((1, 2, 3)), level[:, 0, 0, 0], rtol=1e-5)
    factor = (changed - level)[:, np.abs(centred) > 5] / centred[np.abs(centred) > 5]
    assert np.ptp(factor, axis=1).max() < 1e-3, "one factor an image"
    assert 0.6 - 1e-3 <= factor.min() < 0.61
    assert 1.39 < factor.max() <= 1.4 + 1e-3
    extreme = np.asarray(contrast(pictures(50), KEY, 1.0))
    assert (extreme.min(), extreme.max()) == (0, 255)


# ---------------------------------------------------------------------------------------------------------- cutout
def holes(side: int, fraction: float, count: int = 2000):
    """Cut holes into pictures of colour −1; return where they are, bool[B,H,W], and the pictures."""
    cut = np.asarray(cutout(jnp.full((count, side, side, 3), -1.0), KEY, fraction))
    return np.all(cut >= 0, axis=-1), cut


def test_a_hole_is_one_square_of_one_colour():
    hole, cut = holes(16, 0.5)
    rows, columns = hole.any(2), hole.any(1)
    assert np.array_equal(hole, rows[:, :, None] & columns[:, None, :]), "a rectangle"
    for line in (rows, columns):
        assert np.all(np.abs(np.diff(line, axis=1)).sum(1) <= 2), "in one piece"
    colours = cut.max((1, 2))
    assert np.array_equal(cut, np.where(hole[..., None], colours[:, None, None], -1))
    assert np.array_equal(colours, np.floor(colours))
    assert colours.min() == 0
    assert colours.max() == 255
    assert abs(colours.mean() - 127.5) < 4
    assert len(np.unique(colours, axis=0)) > 1900


@pytest.mark.parametrize(("side", "fraction", "edge"), [(16, 0.5, 9), (20, 0.3, 7), (16, 0.25, 5)])
def test_a_hole_is_clipped_at_the_borders(side, fraction, edge):
    """Centres are uniform over the pixels: `edge` pixels inside, fewer at the borders, each as often as it should."""
    hole, _ = holes(side, fraction)
    half = edge // 2
    expected = [min(side - 1, centre + half) - max(0, centre - half) + 1 for centre in range(side)]
    for axis in (1, 2):
        length = hole.any(axis).sum(1)
        assert set(length) == set(expected)
        assert length.max() == edge
        for size in set(expected):
            share = expected.count(size) / side
            assert abs((length == size).mean() - share) < 0.04, size
    covered = hole.mean(0)
    assert abs(hole.mean() - np.mean(expected) ** 2 / side**2) < 0.01
    np.testing.assert_allclose(covered, covered.T, atol=0.06)
    np.testing.assert_allclose(covered, covered[::-1, ::-1], atol=0.06)


def test_what_is_not_in_the_hole_stays():
    image = pictures(8)
    cut = np.asarray(cutout(image, KEY, 0.5))
    changed = np.any(cut != image, axis=-1)
    for picture in changed:
        rows, columns = np.flatnonzero(picture.any(1)), np.flatnonzero(picture.any(0))
        assert len(rows) <= H / 2 + 1
        assert len(columns) <= H / 2 + 1
    assert 0 < changed.mean() < 0.5
