"""The settings of a convolution, and padding, shifts and tiles of maps [B,H,W,C]."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Pads = tuple[tuple[int, int], ...]  # rows before and after a map, and columns
NO_PADS: Pads = ((0, 0), (0, 0))


class Convolution(NamedTuple):
    """The settings of a convolution. `general` is XLA's own convolution, a function of maps and kernel."""

    strides: tuple[int, int] = (1, 1)
    pads: Pads = NO_PADS
    groups: int = 1
    precision: lax.PrecisionLike = None
    general: Callable[[jax.Array, jax.Array], jax.Array] = lax.conv_general_dilated


def pad_maps(x: jax.Array, fill: jax.Array | float, pads: Iterable[tuple[int, int]]) -> jax.Array:
    """Return `x` [B,H,W,C], padded with the value `fill`; `pads` is ((top, bottom), (left, right))."""
    edges = [(before, after, 0) for before, after in pads]
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


def measure_result(
    x: jax.Array, window: tuple[int, int], strides: tuple[int, int], pads: Iterable[tuple[int, int]]
) -> tuple[int, int]:
    """Return the (rows, columns) of the result of a convolution or a pooling of `x` [B,H,W,C] with `pads`."""
    rows, columns = (
        (side + sum(pad) - length) // stride + 1
        for side, pad, length, stride in zip(x.shape[1:3], pads, window, strides, strict=True)
    )
    return rows, columns


def shift_maps(
    padded: jax.Array, window: tuple[int, int], strides: tuple[int, int], size: tuple[int, int]
) -> Iterator[jax.Array]:
    """Yield, per position in a window, row by row, the values [B, *size, C] of `padded` [B,H,W,C] in all windows."""
    (down, right), (rows, columns) = strides, size
    for i, j in itertools.product(*map(range, window)):
        yield padded[:, i : i + (rows - 1) * down + 1 : down, j : j + (columns - 1) * right + 1 : right]


def join_tiles(tiles: jax.Array) -> jax.Array:
    """Return the maps [B,rows·h,columns·w,C] of tiles [h,w,B,rows,columns,C]."""
    height, width, _, rows, columns, channels = tiles.shape
    return jnp.transpose(tiles, (2, 3, 0, 4, 1, 5)).reshape(-1, rows * height, columns * width, channels)
