"""Max pooling whose gradient reads the position of each maximum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.models.layers.conv.maps import Pads, measure_result, pad_maps, shift_maps


def pool_by_position(x: jax.Array, window_shape: tuple[int, int], strides: tuple[int, int], padding: Pads) -> jax.Array:
    """Return `nnx.max_pool` of `x` [B,H,W,C]. Its gradient goes to the first of equal values, as XLA's."""
    size = measure_result(x, window_shape, strides, padding)
    image = jax.typeof(x)

    def shifts(x: jax.Array, fill: float) -> list[jax.Array]:
        return [*shift_maps(pad_maps(x, fill, padding), window_shape, strides, size)]

    def forward(x: jax.Array):
        largest, *others = shifts(x, -jnp.inf)
        position = jnp.zeros(largest.shape, jnp.int8)
        for number, part in enumerate(others, 1):
            position = jnp.where(part > largest, jnp.int8(number), position)
            largest = jnp.maximum(largest, part)
        return largest, position

    def backward(position: jax.Array, cotangent: jax.Array):
        parts = [jnp.where(position == number, cotangent, 0) for number in range(window_shape[0] * window_shape[1])]
        return jax.linear_transpose(lambda x: shifts(x, 0), image)(parts)

    pool = jax.custom_vjp(lambda x: nnx.max_pool(x, window_shape, strides, padding))
    pool.defvjp(forward, backward)
    return pool(x)
