"""LoRA: low-rank updates of linear layers in a frozen ViT (Hu et al., ICLR 2022)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models.contracts import Adapter, BackboneShape, Setting
from mlmoe_jax.models.layers.values import Dtype, torch_linear
from mlmoe_jax.models.outputs import Delta, Deltas

LAYERS = ("query", "key", "value", "output", "fc1", "fc2")  # of a block, as in ViTShape.layers


class LoRA(Adapter):
    """Adds (alpha / rank)·x·A·B to the outputs of linear layers, for their inputs x, in every block.

    A f32[L, inputs, rank] starts as in the authors' code, B f32[L, rank, outputs] with zeros, so that the features do
    not change at first (LoRA, sec. 4.1). The paths of both begin with `adapters/lora/LAYER/`.
    """

    settings: ClassVar = {
        "rank": Setting(8, "Rank of the update of a layer.", least=1, most=4_096),
        "alpha": Setting(8.0, "The update is multiplied by alpha / rank.", least=0),
        "targets": Setting(("query", "value"), f"The layers that are updated: any of {', '.join(LAYERS)}."),
        "dropout": Setting(
            0.0, "Probability that an entry of an update's input is dropped in training.", least=0, most=1
        ),
    }

    def __init__(self, shape: BackboneShape, settings: ConfigDict, *, dtype: Dtype = None, rngs: nnx.Rngs):
        self.depth, self.targets, self.dtype = shape.depth, tuple(settings.targets), dtype
        self.scale, self.dropout = settings.alpha / settings.rank, nnx.Dropout(settings.dropout, deterministic=True)
        for target in self.targets:
            setattr(self, target, LowRank(shape.depth, *shape.layers[target], settings.rank, rngs=rngs))

    @classmethod
    def from_config(cls, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        return cls(shape, settings, dtype=dtype, rngs=rngs)

    def deltas(self, *, rngs: nnx.Rngs | None = None) -> Deltas:
        return [
            {target: self._delta(getattr(self, target), block, rngs) for target in self.targets}
            for block in range(self.depth)
        ]

    def _delta(self, update: LowRank, block: int, rngs: nnx.Rngs | None) -> Delta:
        drops = not self.dropout.deterministic and self.dropout.rate > 0
        # The key is drawn here, because a recomputed block must not draw another key.
        dropout = partial(self.dropout, rngs=rngs.dropout()) if drops else None
        return partial(
            _low_rank, a=update.a[block], b=update.b[block], scale=self.scale, dtype=self.dtype, dropout=dropout
        )

    def macs(self, tokens: int) -> int:
        updates = (getattr(self, target) for target in self.targets)
        return tokens * sum(update.a.size + update.b.size for update in updates)

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        return f"LoRA (rank {settings.rank}; {', '.join(settings.targets)})"

    @classmethod
    def mistakes(cls, settings: ConfigDict) -> list[str]:
        targets = tuple(settings.targets)
        if targets and set(targets) <= set(LAYERS) and len(set(targets)) == len(targets):
            return []
        return [f"model.adapters.lora.targets must be one or more of {', '.join(LAYERS)}, each once"]


class LowRank(nnx.Module):
    """The matrices of the updates of one layer in all blocks."""

    def __init__(self, depth: int, inputs: int, outputs: int, rank: int, *, rngs: nnx.Rngs):
        self.a = nnx.Param(torch_linear(inputs)(rngs.params(), (depth, inputs, rank)))
        self.b = nnx.Param(jnp.zeros((depth, rank, outputs)))


def _low_rank(
    tokens: jax.Array, *, a: jax.Array, b: jax.Array, scale: float, dtype: Dtype, dropout: Delta | None
) -> jax.Array:
    """Return scale·x·A·B for x f32[b,T,inputs]."""
    tokens = tokens if dropout is None else dropout(tokens)
    dtype = dtype or jnp.result_type(tokens, a)
    return (scale * (tokens.astype(dtype) @ a.astype(dtype))) @ b.astype(dtype)
