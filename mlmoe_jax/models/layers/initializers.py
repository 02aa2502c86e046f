"""Uniform initial values of PyTorch's layers and of the visual-prompt-tuning code."""

import math

import jax
from flax.nnx import Initializer


def uniform(bound: float) -> Initializer:
    """Return an initializer that draws from U(−bound, bound)."""
    return lambda key, shape, dtype=None, **_: jax.random.uniform(key, shape, dtype or float, -bound, bound)


def torch_linear(fan_in: int) -> Initializer:
    """Return an initializer that draws from U(±1/√fan_in), the default of torch.nn.Linear for weight and bias."""
    return uniform(1 / math.sqrt(fan_in))
