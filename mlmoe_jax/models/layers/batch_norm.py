"""Batch normalization with torch's running statistics, in the three modes that papers use for fine-tuning."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from mlmoe_jax.models.layers.initializers import Dtype

EPSILON, MOMENTUM = 1e-5, 0.1


class BatchNorm(nnx.Module):
    """y = (x − μ)/√(σ² + ε)·scale + bias per channel (Ioffe and Szegedy, ICML 2015, algorithms 1 and 2).

    μ and σ² are the mean and the variance of a channel. A new module is in evaluation mode, in which it always
    normalizes by the running statistics. NNX's `train()` and `eval()` switch between training and evaluation mode. The
    statistics of a batch include all its images, so training batches must not contain padding. `momentum` is the weight
    of a batch in the running statistics.

    Args:
      mode: `frozen` normalizes by the running statistics and stops the gradient of scale and bias. `running` normalizes
        by the running statistics, and scale and bias are trainable. `trainable` normalizes by the statistics of the
        whole global batch and updates the running statistics, as torch.nn.BatchNorm2d does in training (nnx.BatchNorm
        defines the running variance differently).
    """

    def __init__(
        self,
        width: int,
        *,
        mode: str = "frozen",
        dtype: Dtype = None,
        epsilon: float = EPSILON,
        momentum: float = MOMENTUM,
    ):
        self.mode = mode
        self.dtype = dtype
        self.epsilon = epsilon
        self.momentum = momentum
        # train() and eval() of nnx.Module set this attribute by its name.
        self.use_running_average = True
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.mean = nnx.BatchStat(jnp.zeros(width))
        self.var = nnx.BatchStat(jnp.ones(width))

    def __call__(self, x: Float[ArrayLike, "b h w d"]) -> Float[Array, "b h w d"]:
        """Normalize in float32 and return the result in `dtype`."""
        scale, bias = self.scale[...], self.bias[...]
        if self.mode == "frozen":
            scale, bias = jax.lax.stop_gradient((scale, bias))
        if self.mode == "trainable" and not self.use_running_average:
            y, statistics = _normalize_by_batch(x, scale, bias, self.epsilon)
            self._record(*jax.lax.stop_gradient(statistics), count=x.size // x.shape[-1])
        else:
            factor = jax.lax.rsqrt(self.var[...] + self.epsilon) * scale
            y = (x.astype(jnp.float32) - self.mean[...]) * factor + bias
        return y.astype(self.dtype or y.dtype)

    def _record(self, mean: jax.Array, var: jax.Array, *, count: int) -> None:
        """Update the running statistics by mean and variance f32[D] of a batch with `count` values per channel."""
        if count < 2:
            raise ValueError("batch statistics need more than one value per channel: use larger images or batches")
        # The running variance is unbiased; the batch is normalized by the biased variance.
        for running, value in ((self.mean, mean), (self.var, var * (count / (count - 1)))):
            running[...] = (1 - self.momentum) * running[...] + self.momentum * value


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalize_by_batch(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float):
    """Return f32[B,H,W,D], normalized by the statistics of `x`, and the statistics: mean and variance f32[D].

    The gradient is a closed form (Ioffe and Szegedy, ICML 2015, below algorithm 1). The returned statistics have no
    gradient. Automatic differentiation has more sums over all values, and XLA stores the input of each sum on a CPU.
    """
    return _normalize_forward(x, scale, bias, epsilon)[0]


def _normalize_forward(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float):
    x32 = x.astype(jnp.float32)
    # E[x²] − E[x]² needs one pass over the values, but loses digits if the mean is large. So one value is subtracted.
    shift = x32[0, x.shape[1] // 2, x.shape[2] // 2]
    shifted = x32 - shift
    offset = shifted.mean((0, 1, 2))
    var = jnp.maximum(jnp.square(shifted).mean((0, 1, 2)) - jnp.square(offset), 0)
    mean = shift + offset
    factor = jax.lax.rsqrt(var + epsilon)
    y = (shifted - offset) * (factor * scale) + bias
    return (y, (mean, var)), (x, mean, factor, scale)


def _normalize_backward(epsilon: float, residuals: tuple[jax.Array, ...], cotangents: tuple):
    x, mean, factor, scale = residuals
    slope, _ = cotangents
    centered = x.astype(jnp.float32) - mean
    count = x.size // x.shape[-1]
    of_bias = slope.sum((0, 1, 2))
    of_scale = (slope * centered).sum((0, 1, 2)) * factor
    of_x = (slope - of_bias / count - centered * (of_scale * factor / count)) * (factor * scale)
    return of_x.astype(x.dtype), of_scale, of_bias


_normalize_by_batch.defvjp(_normalize_forward, _normalize_backward)


def fold_batch_norms(model: nnx.Module) -> None:
    """Fold batch normalizations into the preceding convolutions, for evaluation. The model is changed in place.

    A convolution and its normalization are recognized by their attribute names in a module: `conv` and `norm`, `conv1`
    and `norm1`, and so on. The kernel is multiplied by the factor of the normalization, whose shift becomes the bias.
    Normalizations with other names are not changed.
    """
    for _, module in [*nnx.iter_modules(model)]:
        for name, norm in [*vars(module).items()]:
            conv = getattr(module, name.replace("norm", "conv"), None)
            if isinstance(norm, BatchNorm) and isinstance(conv, nnx.Conv):
                factor = norm.scale[...] / jnp.sqrt(norm.var[...] + norm.epsilon)
                conv.kernel = nnx.Param(conv.kernel[...] * factor)
                conv.use_bias = True
                conv.bias = nnx.Param(norm.bias[...] - norm.mean[...] * factor)
                setattr(module, name, _Identity())


class _Identity(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x
