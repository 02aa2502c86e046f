"""GELU and LayerNorm whose backward passes compute arrays again instead of keeping them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SMALL = 2**16  # values per image


def of_backward_pass(kept: jax.Array, slope: jax.Array) -> jax.Array:
    """Return `kept` [B,…] unchanged, as a value that is known only in the backward pass; `slope` has the same shape.

    Without it, XLA finds that the forward pass computed the same arrays from `kept`, and keeps them for the backward
    pass. `jax.lax.optimization_barrier` would do as well, if the CPU compiler of JAX 0.10 did not remove it. It is used
    on all platforms: on a CPU, a training step takes as long as without it; compiled for a TPU, it accesses fewer bytes
    (docs/performance.md). Arrays of fewer values per image than SMALL are left to XLA, because a narrow ViT has memory
    enough and loses time. Where the slope is not finite, the value is NaN; the gradient is not finite either way.
    """
    if kept.size < SMALL * kept.shape[0]:
        return kept
    return kept + (0 * slope).astype(kept.dtype)


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


class LayerNorm(nnx.LayerNorm):
    """Layer normalization over the last axis in float32, with variance from centered values, scale and bias.

    As `nnx.LayerNorm(…, use_fast_variance=False)`, but the gradient of that one keeps several arrays as large as the
    input. It can be differentiated backward only.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """[…,D] -> f32[…,D]."""
        return _normalized(x, self.scale[...], self.bias[...], self.epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalized(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    return _normalized_forward(x, scale, bias, epsilon)[0]


def _normalized_forward(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> tuple[jax.Array, tuple]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    centered = wide - mean
    factor = jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + epsilon)
    return centered * factor * scale + bias, (x, mean, factor, scale)


def _normalized_backward(_: float, kept: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, factor, scale = kept
    unit, inner = (of_backward_pass(x, slope).astype(jnp.float32) - mean) * factor, slope * scale
    along = unit * (inner * unit).mean(axis=-1, keepdims=True)
    of_x = factor * (inner - inner.mean(axis=-1, keepdims=True) - along)
    tokens = tuple(range(x.ndim - 1))
    return of_x.astype(x.dtype), (slope * unit).sum(axis=tokens), slope.sum(axis=tokens)


_normalized.defvjp(_normalized_forward, _normalized_backward)
