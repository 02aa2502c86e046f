"""Convolutions with 3×3 kernels by Winograd's algorithm, with a quarter to a half of the multiplications.

Each tile of results is Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A, for the kernel g and the values d that the tile reads (Winograd
convolution, sec. 4). With channels, each product of two numbers is a matmul over all tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlmoe_jax.models.layers.conv.maps import Convolution, Pads, join_tiles, measure_result, pad_maps
from mlmoe_jax.models.layers.recompute import dependent_zero

SIZE = 3  # rows and columns of a kernel


@dataclasses.dataclass(frozen=True, eq=False)
class Transforms:
    """The matrices of the algorithm for one size of tiles."""

    image: np.ndarray  # Bᵀ, of what a tile reads
    kernel: np.ndarray  # G
    result: np.ndarray  # Aᵀ, with a row for each row of a tile

    @property
    def tile(self) -> int:
        """The number of rows, and of columns, of a tile of results."""
        return len(self.result)

    @property
    def points(self) -> int:
        """The number n of rows, and of columns, of the input values that a tile reads."""
        return len(self.image)


def _interpolate(*points: float) -> Transforms:
    """Return the transforms of the Cook-Toom algorithm for `points` and infinity.

    A convolution is the product of two polynomials, which its values at these points determine. G and A evaluate
    polynomials, and B interpolates. The rows of Bᵀ are scaled by powers of 2 to similar sizes, the rows of G by the
    inverse.
    """
    image, kernel = [], []
    for number, point in enumerate(points):
        others = np.delete(points, number)
        row = np.append(np.poly(others)[::-1], 0.0)
        scale = 2.0 ** np.round(np.log2(np.abs(row).max()))
        image.append(row / scale)
        kernel.append(scale * point ** np.arange(SIZE) / np.prod(point - others))
    # The value at infinity is the highest coefficient.
    image.append(np.poly(points)[::-1])
    kernel.append(np.eye(SIZE)[-1])
    tile = len(points) + 2 - SIZE
    result = np.column_stack([np.vander(points, tile, increasing=True).T, np.eye(tile)[-1]])
    return Transforms(np.array(image), np.array(kernel), result)


SMALL_TILES = _interpolate(0.0, 1.0, -1.0)
# Of the points ±a and ±b, these have nearly the least error, half of what the usual ±1 and ±2 have.
LARGE_TILES = _interpolate(0.0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve_tiles(x: jax.Array, kernel: jax.Array, how: Convolution, transforms: Transforms) -> jax.Array:
    """Return the convolution of `x` [B,H,W,C] with `kernel` [3,3,C,D], with strides of 1 and pads of at most 2.

    An infinite value makes all results of the tiles that read it NaN.
    """
    weights = _transform_kernel(kernel, transforms.kernel, how.precision, before=x)
    return _convolve(x, weights, transforms, how.pads, how.precision, channels=1)


def _forward(x: jax.Array, kernel: jax.Array, how: Convolution, transforms: Transforms):
    return convolve_tiles(x, kernel, how, transforms), (x, kernel)


def _backward(how: Convolution, transforms: Transforms, residuals: tuple[jax.Array, jax.Array], slope: jax.Array):
    (x, kernel), pads, precision = residuals, how.pads, how.precision
    # The gradient with respect to the maps is the convolution of `slope` with the flipped kernel.
    opposite = tuple((SIZE - 1 - before, SIZE - 1 - after) for before, after in pads)
    weights = _transform_kernel(kernel, np.fliplr(transforms.kernel), precision, before=slope)
    image = _convolve(slope, weights, transforms, opposite, precision, channels=2)
    return image, _kernel_gradient(x, slope, transforms, pads, precision)


convolve_tiles.defvjp(_forward, _backward)


def _transform_kernel(kernel: jax.Array, matrix: np.ndarray, precision, *, before: jax.Array) -> jax.Array:
    """Return G g Gᵀ, computed after `before`. Otherwise XLA would transform and store all kernels at once."""
    return _transform(matrix, kernel, precision, dependent_zero(before))


def _convolve(
    x: jax.Array, weights: jax.Array, transforms: Transforms, pads: Pads, precision, *, channels: int
) -> jax.Array:
    """Return the convolution of `x` with the transformed kernel `weights` [n,n,C,D].

    `channels` is the axis that is summed, counted in [n·n,C,D].
    """
    rows, columns = counts = _count_tiles(x, transforms, pads)
    images = _transform_image(x, transforms, pads, counts)
    weights = weights.reshape(-1, *weights.shape[2:])
    products = lax.dot_general(images, weights, (((2,), (channels,)), ((0,), (0,))), precision)
    products = products.reshape(transforms.points, transforms.points, -1, rows, columns, products.shape[-1])
    result = join_tiles(_transform(transforms.result, products, precision))
    height, width = measure_result(x, (SIZE, SIZE), (1, 1), pads)
    return result[:, :height, :width]


def _kernel_gradient(x: jax.Array, slope: jax.Array, transforms: Transforms, pads: Pads, precision) -> jax.Array:
    """Return the gradient with respect to the kernel, Gᵀ [Σ (Bᵀ d B) ⊙ (A δ Aᵀ)] G, for the tiles δ of `slope`."""
    # XLA would compute Bᵀ d B in the forward pass, where it would stay in memory.
    zero = dependent_zero(slope)
    counts = _count_tiles(x, transforms, pads)
    images = _transform_image(x, transforms, pads, counts, zero)
    slopes = _transform(transforms.result.T, _cut_tiles(slope, transforms.tile, counts), precision)
    slopes = slopes.reshape(len(images), -1, slopes.shape[-1])
    products = lax.dot_general(images, slopes, (((1,), (1,)), ((0,), (0,))), precision)
    products = products.reshape(transforms.points, transforms.points, *products.shape[1:])
    return _transform(transforms.kernel.T, products, precision)


def _count_tiles(x: jax.Array, transforms: Transforms, pads: Pads) -> tuple[int, int]:
    """Return the (rows, columns) of the grid of tiles that covers the result."""
    height, width = measure_result(x, (SIZE, SIZE), (1, 1), pads)
    return -(-height // transforms.tile), -(-width // transforms.tile)


def _transform_image(
    x: jax.Array, transforms: Transforms, pads: Pads, counts: tuple[int, int], zero: jax.Array | float = 0.0
) -> jax.Array:
    """Return Bᵀ d B of the n×n values d that each tile reads of `x` [B,H,W,C], as [n·n,B·rows·columns,C].

    Slices are summed for each row of Bᵀ, because the inputs of tiles overlap. `zero` is the value of the padding.
    """
    edges = [
        (before, (count - 1) * transforms.tile + transforms.points - side - before)
        for (before, _), count, side in zip(pads, counts, x.shape[1:3], strict=True)
    ]
    x = pad_maps(x, zero, edges)
    # The axes of rows and columns are the second and the third; a new axis comes before them.
    for axis, count in enumerate(counts):
        last = (count - 1) * transforms.tile + 1
        slices = [
            lax.slice_in_dim(x, first, first + last, transforms.tile, 1 + 2 * axis)
            for first in range(transforms.points)
        ]
        x = jnp.stack([_weighted_sum(weights, slices) for weights in transforms.image.tolist()], axis)
    return x.reshape(transforms.points**2, -1, x.shape[-1])


def _weighted_sum(weights: Sequence[float], parts: Sequence[jax.Array]) -> jax.Array:
    terms = [part if weight == 1 else weight * part for weight, part in zip(weights, parts, strict=True) if weight]
    return functools.reduce(jnp.add, terms)


def _transform(matrix: np.ndarray, x: jax.Array, precision, zero: jax.Array | float = 0.0) -> jax.Array:
    """Return M x Mᵀ for the matrix M and the first two axes of `x`, as one matmul. `zero`: see `dependent_zero`."""
    both = jnp.asarray(np.kron(matrix, matrix), x.dtype) + zero
    result = jnp.dot(both, x.reshape(both.shape[1], -1), precision=precision)
    return result.reshape(len(matrix), len(matrix), *x.shape[2:])


def _cut_tiles(x: jax.Array, size: int, counts: tuple[int, int]) -> jax.Array:
    """Return the tiles [size,size,B,rows,columns,C] of `x` [B,H,W,C]. Zeros complete the last tiles."""
    rows, columns = counts
    edges = [(0, count * size - side) for count, side in zip(counts, x.shape[1:3], strict=True)]
    x = pad_maps(x, 0.0, edges)
    return jnp.transpose(x.reshape(-1, rows, size, columns, size, x.shape[-1]), (2, 4, 0, 1, 3, 5))
