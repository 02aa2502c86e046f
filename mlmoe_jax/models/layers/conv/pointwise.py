"""Pointwise convolutions as matmuls, and the matmuls of maps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mlmoe_jax.models.layers.conv.maps import Convolution


def convolve_pointwise(x: jax.Array, kernel: jax.Array, how: Convolution) -> jax.Array:
    """Return the convolution of `x` [B,H,W,C] with `kernel` [1,1,C,D], without padding."""
    down, right = how.strides
    return multiply_maps(x[:, ::down, ::right], kernel[0, 0], how.precision)


def multiply_maps(x: jax.Array, kernel: jax.Array, precision) -> jax.Array:
    """Return `x` […,C] times `kernel` [C,D].

    The matmul is computed in two dimensions, because XLA transposes the gradient of a matmul in more dimensions.
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
    return jnp.dot(slopes, kernel.T, precision=precision), contract_rows(rows, slopes, precision)


_product.defvjp(_product_forward, _product_backward)


def contract_rows(rows: jax.Array, slopes: jax.Array, precision) -> jax.Array:
    """Return the product `rows`ᵀ · `slopes` [C,D] of `rows` [R,C] and `slopes` [R,D].

    XLA's matmul is slower if the product has more rows than columns. In this case, the transposed product is computed,
    and then transposed. A reshape between both prevents XLA from moving the transposition into the matmul.
    """
    height, width = rows.shape[1], slopes.shape[1]
    if height <= width or height % 2:
        return jnp.dot(rows.T, slopes, precision=precision)
    product = jnp.dot(slopes.T, rows, precision=precision).reshape(width, 2, height // 2)
    return product.transpose(1, 2, 0).reshape(height, width)
