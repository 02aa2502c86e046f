"""Activation functions by name."""

from collections.abc import Callable

import jax


def gelu(x: jax.Array) -> jax.Array:
    """Return x·Φ(x) with the exact Φ."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return GELU with the approximation of Φ by tanh (Hendrycks and Gimpel, 2016), as in SigLIP."""
    return jax.nn.gelu(x, approximate=True)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Return x·σ(1.702·x), as in OpenAI's CLIP."""
    return x * jax.nn.sigmoid(1.702 * x)


# The choices of heads.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"gelu": gelu, "relu": jax.nn.relu}
