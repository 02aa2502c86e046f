"""XLA's convolution, whose gradient with respect to the kernel is computed by matmuls."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from mlmoe_jax.models.layers.conv.maps import Convolution, pad_maps, shift_maps
from mlmoe_jax.models.layers.conv.pointwise import contract_rows
from mlmoe_jax.models.layers.recompute import dependent_zero

MATMUL_ROWS = 192  # the most rows of a matmul that positions of a kernel share in its gradient


def convolve_with_matmul_gradient(x: jax.Array, kernel: jax.Array, how: Convolution) -> jax.Array:
    """Return XLA's convolution of `x` [B,H,W,C] with `kernel` [h,w,C,D], whose kernel gradient is computed by matmuls.

    XLA itself would compute this gradient as a convolution with the cotangent as its kernel.
    """

    def forward(x: jax.Array, kernel: jax.Array):
        return how.general(x, kernel), (x, kernel)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
        x, kernel = residuals
        (image,) = jax.linear_transpose(lambda x: how.general(x, kernel), x)(cotangent)
        # XLA would compute all shifts in the forward pass, where they would stay in memory.
        padded = pad_maps(x, dependent_zero(cotangent), how.pads)
        shifts = shift_maps(padded, kernel.shape[:2], how.strides, cotangent.shape[1:3])
        return image, _kernel_gradient(shifts, cotangent, how.precision).reshape(kernel.shape)

    convolution = jax.custom_vjp(how.general)
    convolution.defvjp(forward, backward)
    return convolution(x, kernel)


def _kernel_gradient(shifts: Iterable[jax.Array], cotangent: jax.Array, precision) -> jax.Array:
    """Return the gradient [h·w·C,D] with respect to the kernel.

    `shifts` are the inputs [B,H,W,C] of each kernel position, see `shift_maps`. `cotangent` is [B,H,W,D].

    With few channels, several positions share a matmul, because a matmul with few rows wastes time.
    """
    rows = cotangent.reshape(-1, cotangent.shape[-1])
    columns = [part.reshape(-1, part.shape[-1]) for part in shifts]
    together = max(1, MATMUL_ROWS // columns[0].shape[-1])
    products = [
        contract_rows(jnp.concatenate(columns[first : first + together], 1), rows, precision)
        for first in range(0, len(columns), together)
    ]
    return jnp.concatenate(products)
