import colorsys
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.data import transforms
from mlmoe_jax.data.augment import (
    augment,
    brightness,
    contrast,
    cutout,
    flip,
    hue,
    in_random_order,
    saturation,
    shift,
)
from mlmoe_jax.data.randaugment import UDA, standard

H, W = 16, 12
KEY = jax.random.key(0)
# In the order in which they are applied.
STRENGTHS = {
    "flip": True,
    "shift": 0.25,
    "contrast": 0.5,
    "brightness": 0.5,
    "saturation": 0.5,
    "hue": 0.4,
    "cutout": 0.5,
    "randaugment": "standard",
}
TRANSFORMS = {
    "flip": lambda image, key, _: flip(image, key),
    "shift": shift,
    "contrast": contrast,
    "brightness": brightness,
    "saturation": saturation,
    "hue": hue,
    "cutout": cutout,
}
# The index of each one's key among the seven; that of the hue is folded in.
KEYS = {"shift": 0, "contrast": 1, "brightness": 2, "cutout": 3, "flip": 4, "saturation": 5, "randaugment": 6}


def images(count: int, height: int = H, width: int = W) -> jax.Array:
    """Return images that all show the same noise, with no two equal neighboring pixels."""
    one = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.float32)
    return jnp.broadcast_to(one, (count, height, width, 3))


@functools.partial(jax.jit, static_argnames="names")
def compiled(image, key, names):
    return augment(image, key, settings(**{name: STRENGTHS[name] for name in names}))


def settings(**strengths):
    config = default_config().augment
    config.where = "device"
    for name, strength in strengths.items():
        config[name] = strength
    return config


# ------------------------------------------------------------------------------------------------------ all of them
def test_without_strength_nothing_changes():
    image = images(4)
    np.testing.assert_array_equal(augment(image, KEY, settings()), image)
    np.testing.assert_array_equal(shift(image, KEY, 0.0), image)
    np.testing.assert_array_equal(brightness(image, KEY, 0.0), image)
    np.testing.assert_allclose(contrast(image, KEY, 0.0), image, atol=1e-3)
    np.testing.assert_allclose(saturation(image, KEY, 0.0), image, atol=1e-3)


def test_with_augmentation_on_the_host_nothing_changes():
    image = images(4)
    assert augment(image, KEY, settings(where="host", **STRENGTHS)) is image


@pytest.mark.parametrize("name", STRENGTHS)
def test_each_depends_on_its_key_only_and_differs_between_images(name):
    image = images(6)
    changed = compiled(image, KEY, (name,))
    assert changed.shape == image.shape
    assert changed.dtype == image.dtype
    np.testing.assert_array_equal(compiled(image, KEY, (name,)), changed)
    other = compiled(image, jax.random.key(1), (name,))
    assert np.any(np.asarray(other) != changed)
    kinds = len(np.unique(np.asarray(changed).reshape(6, -1), axis=0))
    assert kinds > (1 if name == "flip" else 3), "the same image six times"
    assert 0 <= changed.min() <= changed.max() <= 255


def test_only_the_enabled_transforms_are_applied():
    image = images(3)
    keys = {name: jax.random.split(KEY, 7)[index] for name, index in KEYS.items()} | {"hue": jax.random.fold_in(KEY, 7)}
    pixelwise = [name for name in STRENGTHS if name != "randaugment"]
    every = image
    for name in pixelwise:
        alone = augment(image, KEY, settings(**{name: STRENGTHS[name]}))
        np.testing.assert_array_equal(alone, TRANSFORMS[name](image, keys[name], STRENGTHS[name]))
        every = TRANSFORMS[name](every, keys[name], STRENGTHS[name])
    together = augment(image, KEY, settings(**{name: STRENGTHS[name] for name in pixelwise}))
    np.testing.assert_array_equal(together, every)
    np.testing.assert_allclose(compiled(image, KEY, tuple(pixelwise)), together, atol=1e-3)


def test_randaugment_comes_last_with_the_policy_of_the_settings(monkeypatch):
    def stand_in(image, key, policy, mesh):
        assert mesh is None
        assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.split(KEY, 7)[6]).tolist()
        return image, policy

    monkeypatch.setattr("mlmoe_jax.data.augment.randaugment", stand_in)
    image = images(3)
    last, policy = augment(image, KEY, settings(cutout=0.5, randaugment="uda"))
    np.testing.assert_array_equal(last, augment(image, KEY, settings(cutout=0.5)))
    assert policy == UDA
    chosen = settings(randaugment="standard", randaugment_ops=3, randaugment_magnitude=5)
    assert augment(image, KEY, chosen)[1] == standard(3, 5)


# ------------------------------------------------------------------------------------------------------------ flip
def test_a_flip_mirrors_half_of_the_images():
    image = images(400)
    flipped = np.asarray(flip(image, KEY))
    mirrored = np.all(flipped == np.asarray(image)[:, :, ::-1], axis=(1, 2, 3))
    assert np.array_equal(flipped[~mirrored], image[: np.sum(~mirrored)])
    assert abs(mirrored.mean() - 0.5) < 0.06


# ----------------------------------------------------------------------------------------------------------- shift
def test_a_shift_moves_whole_pixels_and_repeats_borders():
    image = images(200)
    moved, one = np.asarray(shift(image, KEY, 0.25)), np.asarray(image[0])
    padded = np.pad(one, ((4, 4), (3, 3), (0, 0)), mode="edge")
    candidates = {
        (down, right): padded[4 - down : 4 - down + H, 3 - right : 3 - right + W]
        for down in range(-4, 5)
        for right in range(-3, 4)
    }
    found = []
    for one in moved:
        matching = [offset for offset, candidate in candidates.items() if np.array_equal(one, candidate)]
        assert len(matching) == 1
        found += matching
    down, right = np.transpose(found)
    assert set(down) == set(range(-4, 5))
    assert set(right) == set(range(-3, 4))
    assert len(set(found)) > 40, "both directions are drawn independently"


# ------------------------------------------------------------------------------------------- brightness, contrast
def test_brightness_multiplies_by_a_factor_within_its_range():
    image = images(400) / 4
    factor = np.asarray(brightness(image, KEY, 0.3) / jnp.maximum(image, 1e-9))[:, np.asarray(image[0]) > 1]
    assert np.ptp(factor, axis=1).max() < 1e-5, "one factor per image"
    factor = factor[:, 0]
    assert 0.7 <= factor.min() < 0.71
    assert 1.29 < factor.max() <= 1.3
    assert abs(factor.mean() - 1) < 0.03
    assert np.asarray(brightness(images(50), KEY, 1.0)).max() == 255


def test_contrast_scales_about_the_mean_of_the_image():
    level = np.linspace(50, 150, 400)[:, None, None, None]
    centered = np.asarray(images(1)[0] - images(1).mean()) / 10
    changed = np.asarray(contrast(jnp.asarray(level + centered, jnp.float32), KEY, 0.4))
    np.testing.assert_allclose(changed.mean((1, 2, 3)), level[:, 0, 0, 0], rtol=1e-5)
    factor = (changed - level)[:, np.abs(centered) > 5] / centered[np.abs(centered) > 5]
    assert np.ptp(factor, axis=1).max() < 1e-3, "one factor per image"
    assert 0.6 - 1e-3 <= factor.min() < 0.61
    assert 1.39 < factor.max() <= 1.4 + 1e-3
    extreme = np.asarray(contrast(images(50), KEY, 1.0))
    assert (extreme.min(), extreme.max()) == (0, 255)


def test_saturation_scales_about_the_gray_of_each_pixel():
    image = images(400) / 8 + 100
    changed, start = np.asarray(saturation(image, KEY, 0.4)), np.asarray(image)
    weights = np.array([0.299, 0.587, 0.114])
    gray = start @ weights
    np.testing.assert_allclose(changed @ weights, gray, rtol=1e-4)
    color = np.abs(start - gray[..., None]) > 3
    factor = ((changed - gray[..., None]) / (start - gray[..., None]))[:, color[0]]
    assert np.ptp(factor, axis=1).max() < 1e-3, "one factor per image"
    assert 0.6 - 1e-3 <= factor.min() < 0.61
    assert 1.39 < factor.max() <= 1.4 + 1e-3
    extreme = np.asarray(saturation(images(50), KEY, 1.0))
    assert (extreme.min(), extreme.max()) == (0, 255)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_a_factor_means_the_same_on_host_and_device(name):
    class Fixed:
        def uniform(self, low, high):
            return float(jax.random.uniform(KEY, (1, 1, 1, 1), minval=low, maxval=high)[0, 0, 0, 0])

    image = images(1)
    device = np.asarray(TRANSFORMS[name](image, KEY, 0.7))[0]
    host = getattr(transforms, name)(np.asarray(image[0], np.uint8), Fixed(), 0.7)
    assert np.abs(device - host).max() <= 0.501


def test_the_hue_is_turned_in_hsv():
    def turned(pixel, share):
        hue, saturation, value = colorsys.rgb_to_hsv(*map(float, pixel))
        return colorsys.hsv_to_rgb((hue + share) % 1, saturation, value)

    image = np.array(images(1, 32, 32)[0])
    image[0] = image[0, :, :1]  # gray, which has no hue
    image[1, :, 1], image[2, :, 2], image[3] = image[1, :, 0], image[2, :, 0], 0  # ties of the largest value, and black
    for seed in range(4):
        key = jax.random.key(seed)
        share = float(jax.random.uniform(key, (1, 1, 1), minval=-0.5, maxval=0.5)[0, 0, 0])
        expected = [[turned(pixel, share) for pixel in row] for row in image]
        np.testing.assert_allclose(hue(jnp.asarray(image)[None], key, 0.5)[0], expected, atol=1e-3)


def test_the_hue_turns_by_the_whole_range():
    red = jnp.broadcast_to(jnp.array([200.0, 50.0, 50.0]), (400, 2, 2, 3))
    changed = np.asarray(hue(red, KEY, 0.1))[:, 0, 0]
    shares = np.array([colorsys.rgb_to_hsv(*map(float, pixel))[0] for pixel in changed])
    shares = np.where(shares > 0.5, shares - 1, shares)
    assert -0.1 <= shares.min() < -0.095
    assert 0.095 < shares.max() <= 0.1
    assert abs(shares.mean()) < 0.01


# ----------------------------------------------------------------------------------------------------------- jitter
def test_in_random_order_each_image_gets_all_transforms_in_one_of_all_orders():
    def digit(number):
        return lambda values: 10 * values + number

    transforms = [digit(number) for number in (1, 2, 3)]
    found = np.asarray(in_random_order(jnp.zeros((300, 1, 1, 1)), KEY, transforms)).ravel().astype(int)
    numbers, counts = np.unique(found, return_counts=True)
    assert numbers.tolist() == sorted(100 * a + 10 * b + c for a, b, c in itertools.permutations((1, 2, 3)))
    assert counts.min() > 25


def test_the_jitter_of_an_image_has_one_factor_each_in_any_order():
    strengths = {name: STRENGTHS[name] for name in ("contrast", "brightness", "saturation", "hue")}
    image = images(5)
    keys = {name: jax.random.split(KEY, 7)[KEYS[name]] for name in strengths if name != "hue"}
    keys["hue"] = jax.random.fold_in(KEY, 7)
    possible = []
    for order in itertools.permutations(strengths):
        changed = image
        for name in order:
            changed = TRANSFORMS[name](changed, keys[name], STRENGTHS[name])
        possible.append(changed)
    changed = augment(image, KEY, settings(jitter_order="random", **strengths))
    distances = np.abs(np.asarray(possible) - changed).max(axis=(2, 3, 4))
    assert distances.min(axis=0).max() < 1e-2
    assert len(set(distances.argmin(axis=0))) > 1, "the images differ in their order"
    np.testing.assert_allclose(augment(image, KEY, settings(**strengths)), possible[0], atol=1e-2)


# ---------------------------------------------------------------------------------------------------------- cutout
def holes(side: int, fraction: float, count: int = 2000):
    """Cut holes into images of color −1; return a mask of the holes, bool[B,H,W], and the images."""
    cut = np.asarray(cutout(jnp.full((count, side, side, 3), -1.0), KEY, fraction))
    return np.all(cut >= 0, axis=-1), cut


def test_a_hole_is_one_square_of_one_color():
    hole, cut = holes(16, 0.5)
    rows, columns = hole.any(2), hole.any(1)
    assert np.array_equal(hole, rows[:, :, None] & columns[:, None, :]), "a rectangle"
    for line in (rows, columns):
        assert np.all(np.abs(np.diff(line, axis=1)).sum(1) <= 2), "in one piece"
    colors = cut.max((1, 2))
    assert np.array_equal(cut, np.where(hole[..., None], colors[:, None, None], -1))
    assert np.array_equal(colors, np.floor(colors))
    assert colors.min() == 0
    assert colors.max() == 255
    assert abs(colors.mean() - 127.5) < 4
    assert len(np.unique(colors, axis=0)) > 1900


@pytest.mark.parametrize(("side", "fraction", "edge"), [(16, 0.5, 9), (20, 0.3, 7), (16, 0.25, 5)])
def test_a_hole_is_clipped_at_the_borders(side, fraction, edge):
    """Centers are uniform over the pixels: holes are `edge` pixels long inside and shorter at the borders."""
    hole, _ = holes(side, fraction)
    half = edge // 2
    expected = [min(side - 1, center + half) - max(0, center - half) + 1 for center in range(side)]
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


def test_pixels_outside_the_hole_are_unchanged():
    image = images(8)
    cut = np.asarray(cutout(image, KEY, 0.5))
    changed = np.any(cut != image, axis=-1)
    for one in changed:
        rows, columns = np.flatnonzero(one.any(1)), np.flatnonzero(one.any(0))
        assert len(rows) <= H / 2 + 1
        assert len(columns) <= H / 2 + 1
    assert 0 < changed.mean() < 0.5
