import numpy as np
import pytest
from helpers.paths import PARITY
from helpers.twins import error

from mlmoe_jax.models.layers.positions import (
    LINEAR,
    detr_positions,
    resample_positions,
    sine_positions,
)

ARRAYS = np.load(PARITY / "positions.npz")
KINDS = {
    "size": {},
    "offset": {"offset": 0.1},
    "size_antialias": {"antialias": True},
    "linear": {"kernel": LINEAR},
    "linear_antialias": {"kernel": LINEAR, "antialias": True},
}


@pytest.mark.parametrize("grid", [(3, 4), (8, 7), (16, 16), (2, 9)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch(grid, kind):
    ours = resample_positions(ARRAYS["table"], grid, **KINDS[kind])
    assert error(ours, ARRAYS[f"{kind}_{grid[0]}x{grid[1]}"]) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_grid_is_returned_unchanged_for_all_settings(kind):
    assert resample_positions(ARRAYS["table"], (5, 5), **KINDS[kind]).tobytes() == ARRAYS["table"].tobytes()


def test_a_table_in_half_precision_is_resampled_in_float32():
    half = ARRAYS["table"].astype(np.float16)
    ours = resample_positions(half, (8, 7))
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, resample_positions(half.astype(np.float32), (8, 7)))


def test_sine_positions_by_hand():
    table = sine_positions(3, 8, temperature=100.0)
    assert table.shape == (1, 9, 8)
    row, column = 2, 1
    expected = [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01), np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)]
    np.testing.assert_allclose(table[0, row * 3 + column], expected, atol=1e-6)
    # MAE's frequencies are 1/100^0 and 1/100^(1/2)
    expected = [np.sin(1), np.sin(0.1), np.cos(1), np.cos(0.1), np.sin(2), np.sin(0.2), np.cos(2), np.cos(0.2)]
    table = sine_positions(3, 8, temperature=100.0, endpoint=False)
    np.testing.assert_allclose(table[0, row * 3 + column], expected, atol=1e-6)


@pytest.mark.parametrize("grid", [(3, 5), (7, 7)])
def test_detr_positions_equal_those_of_torch(grid):
    theirs = np.load(PARITY / "query.npz")[f"positions/{grid[0]}x{grid[1]}"]
    ours = detr_positions(grid, theirs.shape[1])
    assert ours.dtype == np.float32
    assert error(ours, theirs.reshape(1, theirs.shape[1], -1).transpose(0, 2, 1)) < 2e-6
