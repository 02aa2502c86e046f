"""Initializers of parameters, as in PyTorch's layers and in the visual-prompt-tuning code. `Constant` never trains."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import Initializer

Dtype = jnp.dtype | None  # the type of matmuls; None = float32


def uniform(bound: float) -> Initializer:
    """Return an initializer that draws from U(−bound, bound)."""
    return lambda key, shape, dtype=None, **_: jax.random.uniform(key, shape, dtype or float, -bound, bound)


def torch_uniform(fan_in: int) -> Initializer:
    """Return an initializer that draws from U(±1/√fan_in), as torch.nn.Linear does for weight and bias."""
    return uniform(1 / math.sqrt(fan_in))


def torch_linear(inputs: int, outputs: int, **settings: Any) -> nnx.Linear:
    """Return a linear layer with the initial values of torch.nn.Linear; `settings` are arguments of nnx.Linear."""
    draw = torch_uniform(inputs)
    return nnx.Linear(inputs, outputs, **{"kernel_init": draw, "bias_init": draw, **settings})


class Constant:
    """A read-only array in a model, not a parameter. It is a static part, so it must be hashable: by content."""

    def __init__(self, array: np.ndarray):
        self.value = np.array(array, order="C")
        self.value.setflags(write=False)

    def _content(self) -> tuple[tuple[int, ...], str, bytes]:
        return self.value.shape, self.value.dtype.str, self.value.tobytes()

    def __hash__(self) -> int:
        return hash(self._content())

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Constant) else NotImplemented
