"""Depthwise convolutions as sums of shifted products, which are fast on a CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mlmoe_jax.models.layers.conv.maps import (
    NO_PADS,
    Convolution,
    Pads,
    join_tiles,
    measure_result,
    pad_maps,
    shift_maps,
)
from mlmoe_jax.models.layers.manual_axes import vary_alike

TILE_POSITIONS = 32  # the most positions of a map whose products are summed in one expression


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_depthwise(x: jax.Array, kernel: jax.Array, how: Convolution) -> jax.Array:
    """Return the convolution of each channel of `x` [B,H,W,C] with its kernel in `kernel` [h,w,1,C].

    The sums are computed in float32, and the result has the type of `x`. Only reverse-mode differentiation is possible.
    """
    return _sum_of_shifts(x, kernel, how.strides, how.pads)


def _sum_of_shifts(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], pads: Pads) -> jax.Array:
    """Return a depthwise convolution in float32: a sum of the shifted image times each weight of the kernel."""
    weights = kernel.astype(jnp.float32)
    padded = pad_maps(x, 0.0, pads).astype(jnp.float32)
    size = measure_result(x, kernel.shape[:2], strides, pads)
    # Not len(x), because an exported program has a symbolic batch size.
    total = jnp.zeros((x.shape[0], *size, x.shape[-1]), jnp.float32)
    parts = shift_maps(padded, kernel.shape[:2], strides, size)
    for part, weight in zip(parts, weights.reshape(-1, x.shape[-1]), strict=True):
        total += part * weight
    return total.astype(x.dtype)


def _forward(x: jax.Array, kernel: jax.Array, how: Convolution):
    return convolve_depthwise(x, kernel, how), (x, kernel)


def _backward(how: Convolution, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
    return _image_gradient(*residuals, how, cotangent), _kernel_gradient(*residuals, how, cotangent)


convolve_depthwise.defvjp(_forward, _backward)


def _image_gradient(x: jax.Array, kernel: jax.Array, how: Convolution, cotangent: jax.Array):
    """Return the gradient with respect to the image.

    Positions of the padded image are grouped by their remainders after division by the strides. The positions of a
    group meet the same weights of the kernel. The gradient of a group is a convolution of the cotangent with these
    weights, flipped. The gradients of all groups are then interleaved.
    """
    strides, edges, taps = how.strides, [], []
    for side, pad, outputs, length, stride in zip(
        x.shape[1:3], how.pads, cotangent.shape[1:3], kernel.shape[:2], strides, strict=True
    ):
        most = -(-length // stride)
        taps.append(most)
        edges.append((most - 1, -(-(side + sum(pad)) // stride) - outputs))
    cotangent = pad_maps(cotangent, 0.0, edges)
    parts = []
    for i, j in itertools.product(*map(range, strides)):
        part = kernel[i :: strides[0], j :: strides[1]][::-1, ::-1]
        top, left = (most - length for most, length in zip(taps, part.shape[:2], strict=True))
        parts.append(_sum_of_shifts(cotangent[:, top:, left:], part, (1, 1), NO_PADS))
    (top, _), (left, _) = how.pads
    tiles = jnp.stack(parts).reshape(*strides, *parts[0].shape)
    return join_tiles(tiles)[:, top : top + x.shape[1], left : left + x.shape[2]]


def _kernel_gradient(x: jax.Array, kernel: jax.Array, how: Convolution, cotangent: jax.Array):
    """Return the gradient with respect to the kernel.

    A loop over tiles of the map adds to the sums of all kernel positions at once. This is faster than a separate sum
    over the map for each kernel position.
    """
    window, size, strides = kernel.shape[:2], cotangent.shape[1:3], how.strides
    padded = pad_maps(x, 0.0, how.pads).astype(jnp.float32)
    tile, counts = _tiles(*size)
    # Zeros complete the last tiles.
    rest = [side * count - length for side, count, length in zip(tile, counts, size, strict=True)]
    slopes = pad_maps(cotangent.astype(jnp.float32), 0.0, [(0, after) for after in rest])
    padded = pad_maps(padded, 0.0, [(0, after * stride) for after, stride in zip(rest, strides, strict=True)])
    area = [(side - 1) * stride + length for side, stride, length in zip(tile, strides, window, strict=True)]

    def add_tile(index: jax.Array, total: jax.Array) -> jax.Array:
        row, column = divmod(index, counts[1])
        top, left = row * tile[0], column * tile[1]
        image = _crop(padded, (top * strides[0], left * strides[1]), area)
        return total + _sum_of_products(image, _crop(slopes, (top, left), tile), window, strides)

    # One sum per image, which the threads share.
    total, _ = vary_alike(jnp.zeros((x.shape[0], *window, x.shape[-1]), jnp.float32), x)
    total = lax.fori_loop(0, counts[0] * counts[1], add_tile, total)
    return total.sum(0)[:, :, None].astype(kernel.dtype)


def _tiles(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (rows, columns) of a tile of a map, and (rows, columns) of the grid of tiles."""
    across = -(-columns // TILE_POSITIONS)
    width = -(-columns // across)
    height = min(rows, TILE_POSITIONS // width)
    return (height, width), (-(-rows // height), across)


def _sum_of_products(
    image: jax.Array, slopes: jax.Array, window: tuple[int, int], strides: tuple[int, int]
) -> jax.Array:
    """Return Σ window · slope [B,h,w,C] over the H·W windows of `image` [B,_,_,C] and their `slopes` [B,H,W,C]."""
    (down, right), (height, width) = strides, window
    total = jnp.zeros((), jnp.float32)
    for row, column in itertools.product(*map(range, slopes.shape[1:3])):
        part = image[:, row * down : row * down + height, column * right : column * right + width]
        total += part * slopes[:, row, column, None, None]
    return total


def _crop(x: jax.Array, start: tuple[jax.Array, jax.Array], size: Sequence[int]) -> jax.Array:
    return lax.dynamic_slice(x, (0, *start, 0), (x.shape[0], *size, x.shape[-1]))
