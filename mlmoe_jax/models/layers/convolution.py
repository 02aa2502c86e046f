"""Convolutions and max pooling in forms that are also fast on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mlmoe_jax.models.layers import winograd
from mlmoe_jax.models.layers.depthwise import convolve_depthwise
from mlmoe_jax.models.layers.maps import Pads, measure_result, pad_maps, shift_maps
from mlmoe_jax.models.layers.recompute import dependent_zero

MATMUL_ROWS = 192  # the most rows of a matmul that positions of a kernel share in its gradient


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[Sequence[int]],
    *,
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: int = 1,
    **options,
) -> jax.Array:
    """Return the convolution of `x` [B,H,W,C] with `kernel` [h,w,C/groups,D].

    It is made for `nnx.Conv(conv_general_dilated=convolve)`. Other arguments are as in `jax.lax.conv_general_dilated`.

    On a CPU, a pointwise convolution is computed as a matmul, whose gradients take 1/2 to 1/20 of the time of XLA's
    convolution. A depthwise convolution is computed as a sum of shifted products, which takes 1/5 to 1/30 of the time.
    A 3×3 convolution with many channels is computed by Winograd's algorithm, which takes 1/3 to 3/4 of the time. The
    gradient by any other kernel is computed as matmuls, each for one or more of its positions. The results differ only
    by rounding. Raises ValueError for a dilation.
    """
    if set(lhs_dilation) | set(rhs_dilation) != {1}:
        raise ValueError(f"a convolution has no dilation here, not {lhs_dilation} and {rhs_dilation}")
    strides = tuple(strides)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    pads: Pads = tuple(map(tuple, padding))
    general = functools.partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=pads,
        feature_group_count=feature_group_count,
        **options,
    )
    if feature_group_count == x.shape[-1] == kernel.shape[-1]:
        on_cpu = functools.partial(convolve_depthwise, strides=strides, pads=pads)
    elif kernel.shape[:2] == (1, 1) and feature_group_count == 1 and pads == ((0, 0), (0, 0)):
        on_cpu = functools.partial(_pointwise, strides=strides, precision=options.get("precision"))
    elif feature_group_count == 1 and (transforms := winograd.choose_transforms(x, kernel, strides)):
        on_cpu = functools.partial(
            winograd.convolve_tiles, transforms=transforms, pads=pads, precision=options.get("precision")
        )
    elif feature_group_count == 1:
        on_cpu = _with_matmul_gradient(general, strides, pads, options.get("precision"))
    else:
        return general(x, kernel)
    return lax.platform_dependent(x, kernel, cpu=on_cpu, default=general)


def _pointwise(x: jax.Array, kernel: jax.Array, *, strides: tuple[int, int], precision) -> jax.Array:
    return _matmul(x[:, :: strides[0], :: strides[1]], kernel[0, 0], precision)


def _matmul(x: jax.Array, kernel: jax.Array, precision) -> jax.Array:
    """Return `x` […,C] times `kernel` [C,D].

    It is computed in two dimensions, because XLA transposes the gradient of a matmul in more dimensions, which takes up
    to 13 times as long.
    """
    result = _product(x.reshape(-1, x.shape[-1]), kernel, precision)
    return result.reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(rows: jax.Array, kernel: jax.Array, precision) -> jax.Array:
    return jnp.dot(rows, kernel, precision=precision)


def _product_forward(rows: jax.Array, kernel: jax.Array, precision):
    return _product(rows, kernel, precision), (rows, kernel)


def _product_backward(precision, residuals: tuple[jax.Array, jax.Array], slopes: jax.Array):
    rows, kernel = residuals
    return jnp.dot(slopes, kernel.T, precision=precision), _contract_rows(rows, slopes, precision)


_product.defvjp(_product_forward, _product_backward)


def _contract_rows(rows: jax.Array, slopes: jax.Array, precision) -> jax.Array:
    """Return the product [C,D] of `rows` [R,C], transposed, and `slopes` [R,D].

    XLA's matmul takes up to 1.4 times as long if the product has more rows than columns, so this one is transposed
    afterwards. XLA would move the transposition into a matmul, but not past a reshape.
    """
    height, width = rows.shape[1], slopes.shape[1]
    if height <= width or height % 2:
        return jnp.dot(rows.T, slopes, precision=precision)
    product = jnp.dot(slopes.T, rows, precision=precision).reshape(width, 2, height // 2)
    return product.transpose(1, 2, 0).reshape(height, width)


def dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers, *, precision=None, **options) -> jax.Array:
    """Return `x` […,C] times `kernel` [C,D], with a fast gradient also on a CPU.

    It is made for `nnx.Linear(dot_general=dot_general)` on maps. The arguments are as in `jax.lax.dot_general`.
    """
    general = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, precision=precision, **options)
    return lax.platform_dependent(x, kernel, cpu=functools.partial(_matmul, precision=precision), default=general)


def _with_matmul_gradient(
    general: Callable[[jax.Array, jax.Array], jax.Array], strides: tuple[int, int], pads: Pads, precision
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the convolution `general`, whose gradient by the kernel is computed as matmuls.

    XLA computes it as a convolution with the cotangent as the kernel, which takes up to 4 times as long on a CPU.
    """

    def forward(x: jax.Array, kernel: jax.Array):
        return general(x, kernel), (x, kernel)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
        x, kernel = residuals
        (image,) = jax.linear_transpose(lambda x: general(x, kernel), x)(cotangent)
        # XLA would compute all shifts in the forward pass, where they would stay in memory.
        padded = pad_maps(x, dependent_zero(cotangent), pads)
        shifts = shift_maps(padded, kernel.shape[:2], strides, cotangent.shape[1:3])
        return image, _matmul_gradient(shifts, cotangent, precision).reshape(kernel.shape)

    convolution = jax.custom_vjp(general)
    convolution.defvjp(forward, backward)
    return convolution


def _matmul_gradient(shifts: Iterable[jax.Array], cotangent: jax.Array, precision) -> jax.Array:
    """Return the gradient by the kernel [h·w·C,D], from what its positions read [B,H,W,C], and from the cotangent.

    With few channels, several positions share a matmul, because a matmul with few rows wastes time.
    """
    rows = cotangent.reshape(-1, cotangent.shape[-1])
    columns = [part.reshape(-1, part.shape[-1]) for part in shifts]
    together = max(1, MATMUL_ROWS // columns[0].shape[-1])
    products = [
        _contract_rows(jnp.concatenate(columns[first : first + together], 1), rows, precision)
        for first in range(0, len(columns), together)
    ]
    return jnp.concatenate(products)


def max_pool(x: jax.Array, window: tuple[int, int], strides: tuple[int, int], pads: Pads) -> jax.Array:
    """Return the largest value of each window of `x` [B,H,W,C]; its gradient goes to the first of equal values.

    On a CPU, its gradient with the forward pass takes 1/4 of the time of XLA's gradient of `nnx.max_pool`. On an NVIDIA
    GPU, both move 2/5 of the bytes.
    """
    general = functools.partial(nnx.max_pool, window_shape=window, strides=strides, padding=pads)
    size = measure_result(x, window, strides, pads)
    image = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def shifts(x: jax.Array, fill: float) -> list[jax.Array]:
        return [*shift_maps(pad_maps(x, fill, pads), window, strides, size)]

    def forward(x: jax.Array):
        largest, *others = shifts(x, -jnp.inf)
        position = jnp.zeros(largest.shape, jnp.int8)
        for number, part in enumerate(others, 1):
            position = jnp.where(part > largest, jnp.int8(number), position)
            largest = jnp.maximum(largest, part)
        return largest, position

    def backward(position: jax.Array, cotangent: jax.Array):
        parts = [jnp.where(position == number, cotangent, 0) for number in range(window[0] * window[1])]
        return jax.linear_transpose(lambda x: shifts(x, 0), image)(parts)

    pool = jax.custom_vjp(general)
    pool.defvjp(forward, backward)
    return lax.platform_dependent(x, cpu=pool, cuda=pool, default=general)
