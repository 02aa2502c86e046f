"""Layer normalization whose backward pass keeps its input and two numbers per token."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.models.layers.recompute import of_backward_pass


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
    return _forward(x, scale, bias, epsilon)[0]


def _forward(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> tuple[jax.Array, tuple]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    centered = wide - mean
    factor = jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + epsilon)
    return centered * factor * scale + bias, (x, mean, factor, scale)


def _backward(_: float, kept: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, factor, scale = kept
    unit, inner = (of_backward_pass(x, slope).astype(jnp.float32) - mean) * factor, slope * scale
    along = unit * (inner * unit).mean(axis=-1, keepdims=True)
    of_x = factor * (inner - inner.mean(axis=-1, keepdims=True) - along)
    tokens = tuple(range(x.ndim - 1))
    return of_x.astype(x.dtype), (slope * unit).sum(axis=tokens), slope.sum(axis=tokens)


_normalized.defvjp(_forward, _backward)
