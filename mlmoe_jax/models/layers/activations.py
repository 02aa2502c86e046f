"""Activation functions by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe_jax.models.layers.recompute import of_backward_pass


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Return x·Φ(x) with the exact Φ, computed in float32. It can be differentiated backward only.

    The backward pass keeps x alone; that of `jax.nn.gelu` keeps parts of Φ and of its slope, each as large as x.
    """
    wide = x.astype(jnp.float32)
    return (wide * _below(wide)).astype(x.dtype)


def _below(x: jax.Array) -> jax.Array:
    """Return Φ(x), the share of a normal distribution below x."""
    return 0.5 * (1 + jax.lax.erf(x * np.float32(0.5**0.5)))


def _gelu_backward(x: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    wide = of_backward_pass(x, slope).astype(jnp.float32)
    density = np.float32((2 * np.pi) ** -0.5) * jnp.exp(-0.5 * jnp.square(wide))
    return ((slope * (_below(wide) + wide * density)).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return GELU with the approximation of Φ by tanh (Hendrycks and Gimpel, 2016), as in SigLIP."""
    return jax.nn.gelu(x, approximate=True)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Return x·σ(1.702·x), as in OpenAI's CLIP."""
    return x * jax.nn.sigmoid(1.702 * x)


# The choices of heads.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"gelu": gelu, "relu": jax.nn.relu}
