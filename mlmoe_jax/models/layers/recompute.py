"""Arrays that are recomputed later instead of stored, and GELU and LayerNorm whose backward passes do so."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.layers.manual_axes import vary_alike

MIN_RECOMPUTED = 2**16  # values per image


def in_backward_pass(residual: jax.Array, slope: jax.Array) -> jax.Array:
    """Return `residual` [B,…] unchanged, but with a dependency on `slope` [B,…], a value of the backward pass.

    XLA can then compute arrays from the result only in the backward pass. Without the dependency, XLA detects that the
    forward pass computes equal arrays, and stores these. `jax.lax.optimization_barrier` is not used, because the CPU
    compiler of JAX 0.10 removes it. On a CPU, a training step takes as long as without this function. Compiled for a
    TPU, a step needs less memory. Arrays with fewer than MIN_RECOMPUTED values per image are left to XLA, because a
    narrow ViT has enough memory and would lose time. If the first slope of an image is not finite, the returned values
    of this image are NaN. The gradient is then not finite in any case.
    """
    if residual.size < MIN_RECOMPUTED * residual.shape[0]:
        return residual
    first = slope[:, *[slice(1)] * (slope.ndim - 1)]
    return residual + (0 * first).astype(residual.dtype)


def dependent_zero(x: jax.Array) -> jax.Array:
    """Return 0 as an array [] that XLA can compute only after `x`, whether `x` is finite or not.

    Arrays that depend on the result are then computed after `x`, too. Otherwise XLA may compute and store them earlier.
    """
    return jnp.fmin(jnp.abs(x[(0,) * x.ndim]), 0)


@jax.custom_vjp
def rectify_by_result(x: jax.Array) -> jax.Array:
    """Return ReLU. Its gradient reads the result; otherwise XLA on a CPU would recompute `x` of all earlier blocks."""
    return jnp.where(x <= 0, 0, x)


def _rectify_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    result = rectify_by_result(x)
    return result, result


rectify_by_result.defvjp(_rectify_forward, lambda result, slope: (jnp.where(result <= 0, 0, slope),))


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Return x·Φ(x) with the exact Φ, in float32. Only reverse-mode differentiation is possible; only x is stored.

    `jax.nn.gelu` stores parts of Φ and of its slope, each as large as x.
    """
    x32 = x.astype(jnp.float32)
    return (x32 * _normal_cdf(x32)).astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    """Return Φ(x), the normal distribution function."""
    return 0.5 * (1 + jax.lax.erf(x * np.float32(0.5**0.5)))


def _gelu_backward(x: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    x32 = in_backward_pass(x, slope).astype(jnp.float32)
    density = np.float32((2 * np.pi) ** -0.5) * jnp.exp(-0.5 * jnp.square(x32))
    return ((slope * (_normal_cdf(x32) + x32 * density)).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


class LayerNorm(nnx.LayerNorm):
    """Layer normalization over the last axis in float32, with variance from centered values, scale and bias.

    Equal to `nnx.LayerNorm(…, use_fast_variance=False)`, which stores several arrays as large as the input for its
    gradient. Only reverse-mode differentiation is possible.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalized tokens f32[…,D] for `x` […,D]."""
        return _normalize(*vary_alike(x, self.scale[...], self.bias[...]), self.epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    return _normalize_forward(x, scale, bias, epsilon)[0]


def _normalize_forward(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> tuple[jax.Array, tuple]:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(axis=-1, keepdims=True)
    centered = x32 - mean
    factor = jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + epsilon)
    return centered * factor * scale + bias, (x, mean, factor, scale)


def _normalize_backward(_: float, residuals: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, factor, scale = residuals
    unit = (in_backward_pass(x, slope).astype(jnp.float32) - mean) * factor
    inner = slope * scale
    along = unit * (inner * unit).mean(axis=-1, keepdims=True)
    x_slope = factor * (inner - inner.mean(axis=-1, keepdims=True) - along)
    tokens = tuple(range(x.ndim - 1))
    return x_slope.astype(x.dtype), (slope * unit).sum(axis=tokens), slope.sum(axis=tokens)


_normalize.defvjp(_normalize_forward, _normalize_backward)
