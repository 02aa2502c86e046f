"""Adapters that learn vectors for the outputs of layers in a frozen ViT: BitFit and SSF.

BitFit: Ben Zaken et al., ACL 2022. SSF: Lian et al., NeurIPS 2022.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models.adapters.catalog import ALL, TUNED_LAYERS
from mlmoe_jax.models.contracts import Adapter, BackboneShape, Layer
from mlmoe_jax.models.layers.deltas import Deltas, LayerCall
from mlmoe_jax.models.layers.initializers import Dtype


class _Vectors(Adapter):
    """The base class of adapters that learn vectors: f32[L, outputs] per layer in blocks, f32[1, outputs] outside."""

    vectors: ClassVar[type[nnx.Module]]
    """The module with the vectors f32[size] of a layer, (size, rngs) -> ((index of its path, LayerCall) -> delta)."""
    merges = True

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        self.shape = shape
        names = TUNED_LAYERS if ALL in settings.targets else settings.targets
        self.targets = tuple(name for name in shape.layers if name in names and self.tunes(shape.layers[name]))
        for target in self.targets:
            size = len(shape.layer_paths(target)), shape.layers[target].outputs
            setattr(self, target, self.vectors(size, rngs))

    def deltas(self, *, rngs: nnx.Rngs | None = None) -> Deltas:
        return {
            path: partial(getattr(self, target), index)
            for target in self.targets
            for index, path in enumerate(self.shape.layer_paths(target))
        }

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        names = "" if ALL in settings.targets else f" ({', '.join(settings.targets)})"
        return f"{cls.__name__}{names}"

    def tunes(self, layer: Layer) -> bool:
        """Return whether a layer of the backbone can be tuned."""
        return True


class _Shift(nnx.Module):
    def __init__(self, size: tuple[int, int], rngs: nnx.Rngs):
        self.bias = nnx.Param(jnp.zeros(size))

    def __call__(self, index: int, call: LayerCall) -> jax.Array:
        return jnp.broadcast_to(self.bias[index], call.output.shape)


class BitFit(_Vectors):
    """BitFit: tunes the biases of the linear layers and norms of the backbone (BitFit, sec. 3).

    The parameter `adapters/bitfit/LAYER/bias` is the change of a bias, which starts with 0. Layers without a bias, such
    as the keys of DINOv3, are not tuned.
    """

    vectors = _Shift

    def tunes(self, layer: Layer) -> bool:
        return layer.bias


class _ScaleShift(nnx.Module):
    def __init__(self, size: tuple[int, int], rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.02)
        self.scale = nnx.Param(1 + draw(rngs.params(), size))
        self.shift = nnx.Param(draw(rngs.params(), size))

    def __call__(self, index: int, call: LayerCall) -> jax.Array:
        return (self.scale[index] - 1) * call.output + self.shift[index]


class SSF(_Vectors):
    """SSF: multiplies the outputs of the linear layers and norms by a learned scale, and adds a learned shift.

    An output y becomes scale·y + shift (SSF, sec. 3.2). As in the authors' code, initial values have a standard
    deviation of 0.02, around 1 (scale) and 0 (shift). Paths begin with `adapters/ssf/LAYER/`.
    """

    vectors = _ScaleShift

    def macs(self, tokens: int) -> int:
        return tokens * sum(getattr(self, target).scale.size for target in self.targets)
