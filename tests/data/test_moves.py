import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.data.moves import rotate, slide, window

RANDOM = np.random.default_rng(0)
turned = jax.jit(lambda planes, degrees: rotate(planes, degrees, 45, 128))


@pytest.mark.parametrize("length", [1, 5, 12, 13])
def test_a_window_of_each_line_begins_where_it_is_told_to(length):
    lines = RANDOM.integers(0, 1000, (4, 3, 13))
    start = RANDOM.integers(0, 13 - length + 1, (4, 3, 1))
    expected = np.take_along_axis(lines, start + np.arange(length), axis=-1)
    np.testing.assert_array_equal(window(jnp.asarray(lines), jnp.asarray(start), length), expected)
    upright = window(jnp.asarray(lines.swapaxes(1, 2)), jnp.asarray(start.swapaxes(1, 2)), length, axis=1)
    np.testing.assert_array_equal(upright, expected.swapaxes(1, 2))


def test_a_slide_moves_each_row_by_its_own_offset():
    planes = RANDOM.integers(0, 256, (3, 6, 9))
    offset = np.array([0, 1, -2, 4, -4, 3])
    moved = np.asarray(slide(jnp.asarray(planes), jnp.asarray(offset, jnp.float32), 4, 77))
    source = np.arange(9) + offset[:, None]
    expected = np.take_along_axis(planes, np.clip(source, 0, 8)[None].repeat(3, 0), axis=-1)
    np.testing.assert_array_equal(moved, np.where((source >= 0) & (source < 9), expected, 77))


def test_a_slide_between_pixels_interpolates_and_repeats_the_border():
    row = RANDOM.integers(0, 256, 8)
    moved = np.asarray(slide(jnp.broadcast_to(jnp.asarray(row), (3, 1, 8)), jnp.array([0.5]), 1, 0))
    halfway = np.convolve(np.pad(row, (1, 2), mode="edge"), np.array([-1, 5, 5, -1]) / 8, mode="valid")
    np.testing.assert_array_equal(moved[:, 0], [[*np.clip(halfway[:7], 0, 255).astype(int), 0]] * 3)


@pytest.mark.parametrize("degrees", [-45, -30, -12.345, -0.1, 0, 0.05, 1, 17.5, 29.99, 30, 44])
def test_a_rotation_takes_the_pixels_that_pillow_takes(degrees):
    image = RANDOM.integers(0, 256, (67, 110, 3), dtype=np.uint8)
    ours = np.asarray(turned(jnp.asarray(image.transpose(2, 0, 1), jnp.int32), jnp.float32(degrees)))
    expected = Image.fromarray(image).rotate(degrees, fillcolor=(128, 128, 128))
    np.testing.assert_array_equal(ours.transpose(1, 2, 0), expected)
