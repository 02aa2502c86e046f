"""The base class of convolutional backbones, and a convolution with its normalization."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from mlmoe_jax.models.layers.dispatch import convolve
from mlmoe_jax.models.outputs import CLS, MEAN, PATCHES, Features, Prompts


class ConvNorm(nnx.Module):
    """A convolution and its normalization."""

    def __init__(self, conv: nnx.Conv, norm: nnx.Module):
        self.conv = conv
        self.norm = norm

    def __call__(self, x: Float[ArrayLike, "b _ _ _"]) -> Float[Array, "b _ _ d"]:
        return self.norm(self.conv(x))


def convolution(inputs: int, outputs: int, size: int, **settings: Any) -> nnx.Conv:
    """Return a convolution, by default padded so that a stride of 1 keeps the size; `settings`: see nnx.Conv."""
    padding = ((size // 2, size // 2),) * 2
    options = {"padding": padding, "conv_general_dilated": convolve, **settings}
    return nnx.Conv(inputs, outputs, (size, size), **options)


def run_blocks(blocks: Iterable[nnx.Module], x: Array, *, remat: bool) -> Array:
    """Apply blocks one after another. With `remat`, the backward pass recomputes their activations."""
    for block in blocks:
        x = nnx.remat(type(block).__call__)(block, x) if remat else block(x)
    return x


class ConvolutionalBackbone(nnx.Module):
    """The base class of convolutional backbones. Their features are the cells of the last feature map and its mean."""

    norm: Callable[[Array], Array] | None = None
    """The final norm, if there is one, which is applied to the mean and to each cell."""

    @abc.abstractmethod
    def last_map(self, image: Float[ArrayLike, "b h w 3"]) -> Float[Array, "b _ _ d"]:
        """Return the last feature map. In the published model, its mean is the input of the classifier."""

    def __call__(
        self,
        image: Float[ArrayLike, "b h w 3"],
        prompts: Prompts | None = None,
        *,
        read: Collection[str] = (CLS,),
        norm: bool = True,
        return_attention: bool = False,
    ) -> Features:
        """Encode images; see contracts.Backbone for the arguments.

        The feature `patches` has the cells of the last map. The features `cls` and `mean` are both the mean of the last
        map, in float32 for every type of the map. `return_attention` adds no attention, only `Features.cells`. Raises
        ValueError if `prompts` is not None, or if `read` is empty or has a feature other than these three.
        """
        if prompts is not None or not read or set(read) - {CLS, PATCHES, MEAN}:
            problem = "takes no prompts" if prompts is not None else f"cannot read {sorted(read)}"
            raise ValueError(f"a convolutional backbone has cls, patches and mean; {problem}")
        last_map = self.last_map(image)
        batch, rows, columns, width = last_map.shape
        parts = {name: last_map.mean((1, 2), dtype=jnp.float32) for name in (CLS, MEAN) if name in read}
        if PATCHES in read or return_attention:
            parts[PATCHES] = last_map.reshape(batch, -1, width)
        if norm and self.norm is not None:
            parts = {name: self.norm(part) for name, part in parts.items()}
        cells = dict.fromkeys(read, parts[PATCHES]) if return_attention else {}
        patches = parts[PATCHES] if PATCHES in read else None
        return Features(parts.get(CLS), None, patches, (rows, columns), cells=cells, mean=parts.get(MEAN))
