"""Activation functions by name."""

from collections.abc import Callable

import jax


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"gelu": _gelu, "relu": jax.nn.relu}
