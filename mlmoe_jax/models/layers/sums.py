"""The sum of the squares of an array."""

import jax
import jax.numpy as jnp
from jax import lax

from mlmoe_jax.models.layers.manual_axes import vary_alike


def square_sum(x: jax.Array) -> jax.Array:
    """Return the sum of the squares of all values, []."""
    return jnp.sum(jnp.square(x))


def square_sum_by_parts(x: jax.Array) -> jax.Array:
    """Return the sum of the squares of all values, [], summed part by part along the first axis.

    Gradients of matmuls are often transposed, and XLA on a CPU sums a transposed array as windows, slowly.
    """

    def add_part(row: jax.Array, total: jax.Array) -> jax.Array:
        return total + square_sum(lax.dynamic_index_in_dim(x, row, keepdims=False))

    start, _ = vary_alike(jnp.zeros((), x.dtype), x)
    return lax.fori_loop(0, x.shape[0], add_part, start)
