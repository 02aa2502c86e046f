from pathlib import Path

import numpy as np
import pytest

from mlmoe_jax.models.positions import bicubic_weights, resample_positions, sine_positions

ARRAYS = np.load(Path(__file__).parents[1] / "parity" / "positions.npz")


@pytest.mark.parametrize("grid", [(3, 4), (8, 7), (16, 16)])
@pytest.mark.parametrize(("kind", "offset"), [("size", 0.0), ("offset", 0.1)])
def test_equals_torch(grid, kind, offset):
    ours = resample_positions(ARRAYS["table"], grid, offset=offset)
    theirs = ARRAYS[f"{kind}_{grid[0]}x{grid[1]}"]
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_the_offset_is_visible():
    plain, shifted = (ARRAYS[f"{kind}_8x7"] for kind in ("size", "offset"))
    assert np.abs(plain - shifted).max() > 0.01


def test_the_native_grid_is_untouched_whatever_the_offset():
    for offset in (0.0, 0.1):
        assert resample_positions(ARRAYS["table"], (5, 5), offset=offset).tobytes() == ARRAYS["table"].tobytes()


def test_weights_sum_to_one_also_at_the_border():
    for source, target in ((37, 16), (5, 9), (7, 7)):
        np.testing.assert_allclose(bicubic_weights(source, target).sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(bicubic_weights(7, 7), np.eye(7))


def test_sine_positions_by_hand():
    table = sine_positions(3, 8, temperature=100.0)
    assert table.shape == (1, 9, 8)
    row, column = 2, 1
    expected = [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01), np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)]
    np.testing.assert_allclose(table[0, row * 3 + column], expected, atol=1e-6)
    with pytest.raises(ValueError, match="multiple of 4"):
        sine_positions(3, 6)
