"""What the convolutional backbones share: a convolution with its batch normalization, and the features of a map."""

from __future__ import annotations

from collections.abc import Callable, Collection

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.outputs import CLS, MEAN, PATCHES, Features, Prompts


class ConvNorm(nnx.Module):
    """A convolution and its batch normalization."""

    def __init__(self, conv: nnx.Conv, norm: BatchNorm):
        self.conv, self.norm = conv, norm

    def __call__(self, x: Float[ArrayLike, "b _ _ _"]) -> Float[Array, "b _ _ d"]:
        return self.norm(self.conv(x))


def check_read(prompts: Prompts | None, read: Collection[str]) -> None:
    """Raise ValueError for prompts, and for features that convolutional backbones do not have."""
    if prompts is not None or not read or set(read) - {CLS, PATCHES, MEAN}:
        problem = "takes no prompts" if prompts is not None else f"cannot read {sorted(read)}"
        raise ValueError(f"a convolutional backbone has cls, patches and mean; {problem}")


def read_map(
    feature_map: Float[ArrayLike, "b h w d"], read: Collection[str], norm: Callable[[Array], Array] | None = None
) -> Features:
    """Return the mean of a map as `cls` and `mean`, and its cells as `patches`; `norm` normalizes all of them.

    The mean is computed and returned in float32 for every type of the map.
    """
    batch, *grid, width = feature_map.shape
    parts = {}
    for name in (CLS, MEAN):
        if name in read:
            parts[name] = feature_map.mean((1, 2), dtype=jnp.float32)
    if PATCHES in read:
        parts[PATCHES] = feature_map.reshape(batch, -1, width)
    if norm is not None:
        parts = {name: norm(part) for name, part in parts.items()}
    return Features(parts.get(CLS), None, parts.get(PATCHES), tuple(grid), mean=parts.get(MEAN))
