"""Modules with random values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def drawn(module: nnx.Module | Callable[[], nnx.Module], scale: float = 1.0, seed: int = 0, *, ones: bool = False):
    """Return a module with normally distributed values from numpy, so that each has an effect; this compiles nothing.

    Variances are at least 0.5.

    Args:
      module: the module, or a function that makes it, of which only the shapes are computed.
      scale: the standard deviation.
      seed: of the numbers.
      ones: whether scales have the mean 1.
    """
    module = module if isinstance(module, nnx.Module) else nnx.eval_shape(module)
    draw = np.random.default_rng(seed)

    def value(path, x):
        name = jax.tree_util.keystr(path)
        mean = 1.0 if ones and "scale" in name else 0.0
        values = draw.normal(mean, scale, x.shape)
        return jnp.asarray(np.abs(values) + 0.5 if "var" in name else values, x.dtype)

    nnx.update(module, jax.tree_util.tree_map_with_path(value, nnx.state(module)))
    return module
