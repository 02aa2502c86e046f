"""Batch normalisation with torch's running statistics, and the three ways in which papers fine-tune it."""

import jax
import jax.numpy as jnp
from flax import nnx

EPSILON, MOMENTUM = 1e-5, 0.1
BATCH_NORMS = ("frozen", "running", "trainable")


class BatchNorm(nnx.Module):
    """y = (x − μ)/√(σ² + ε)·scale + bias for each channel (Ioffe and Szegedy, ICML 2015, algorithms 1 and 2).

    mode: `frozen` normalises by the running statistics and lets no gradient into scale and bias. `running` normalises
    by them too, and scale and bias can learn. `trainable` normalises by the statistics of the whole global batch and
    moves the running ones, as torch.nn.BatchNorm2d does in training: nnx.BatchNorm keeps another running variance.

    A module is made for evaluation, where all modes normalise by the running statistics; NNX's `train()` and `eval()`
    switch it. Every image of a batch counts: fill none up with padding in training.
    """

    def __init__(
        self,
        width: int,
        *,
        mode: str = "frozen",
        dtype: jnp.dtype | None = None,
        epsilon: float = EPSILON,
        momentum: float = MOMENTUM,
    ):
        if mode not in BATCH_NORMS:
            raise ValueError(f"batch normalisation is one of {', '.join(BATCH_NORMS)}, not {mode!r}")
        self.mode, self.dtype = mode, dtype
        self.epsilon, self.momentum = epsilon, momentum
        # The name by which train() and eval() of nnx.Module know the switch.
        self.use_running_average = True
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(width)), nnx.BatchStat(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """f32[B,H,W,D] -> f32[B,H,W,D], computed in float32 and returned in `dtype`."""
        x, scale, bias = x.astype(jnp.float32), self.scale[...], self.bias[...]
        if self.mode == "frozen":
            scale, bias = jax.lax.stop_gradient((scale, bias))
        if self.mode == "trainable" and not self.use_running_average:
            mean, var = self._measure(x)
        else:
            mean, var = self.mean[...], self.var[...]
        y = (x - mean) * (jax.lax.rsqrt(var + self.epsilon) * scale) + bias
        return y.astype(self.dtype or y.dtype)

    def _measure(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return mean and variance f32[D] of f32[B,H,W,D], and move the running ones towards them."""
        count = x.size // x.shape[-1]
        if count < 2:
            raise ValueError("batch statistics need more than one value a channel: use larger images or batches")
        mean = x.mean((0, 1, 2))
        # From centred values: E[x²] − E[x]² would lose digits where the mean is large.
        var = jnp.square(x - mean).mean((0, 1, 2))
        # The running variance is the unbiased one, the batch is normalised by the biased one.
        seen = jax.lax.stop_gradient((mean, var * (count / (count - 1))))
        for running, value in zip((self.mean, self.var), seen, strict=True):
            running[...] = (1 - self.momentum) * running[...] + self.momentum * value
        return mean, var
