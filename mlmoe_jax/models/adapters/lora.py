"""Low-rank updates of linear layers in a frozen ViT: LoRA, rsLoRA and DoRA.

LoRA: Hu et al., ICLR 2022. rsLoRA: Kalajdzievski, arXiv:2312.03732. DoRA: Liu et al., ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.contracts import Adapter, BackboneShape
from mlmoe_jax.models.layers.deltas import Delta, Deltas, LayerCall, layer_path
from mlmoe_jax.models.layers.dropout import drops
from mlmoe_jax.models.layers.initializers import Dtype, torch_uniform
from mlmoe_jax.models.params import Params, named_variables

Dropout = Callable[[jax.Array], jax.Array]


class LoRA(Adapter):
    """LoRA: adds (alpha / rank)·x·A·B to the output of linear layers with the input x, in every block.

    A f32[L, inputs, rank] starts as in the authors' code, B f32[L, rank, outputs] with zeros, so that the features do
    not change at first (LoRA, sec. 4.1). The paths of both begin with `adapters/lora/LAYER/`. With `rank_stabilized`,
    the factor is alpha / √rank, with which outputs and gradients keep their size for large ranks (rsLoRA, sec. 3).
    """

    merges = True

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        self.depth = shape.depth
        self.targets = tuple(settings.targets)
        self.dtype = dtype
        self.scale = settings.alpha / (math.sqrt(settings.rank) if settings.rank_stabilized else settings.rank)
        self.dropout = nnx.Dropout(settings.dropout, deterministic=True)
        for target in self.targets:
            inputs, outputs, *_ = shape.layers[target]
            if settings.rank > min(inputs, outputs):
                raise UserError(
                    f"model.adapters.{type(self).__name__.lower()}.rank is {settings.rank}, above the width "
                    f"{min(inputs, outputs)} of {target}; take a smaller rank"
                )
            setattr(self, target, LowRank(shape.depth, inputs, outputs, settings.rank, rngs=rngs))

    def deltas(self, *, rngs: nnx.Rngs | None = None) -> Deltas:
        return {
            layer_path(block, target): self._delta(getattr(self, target), block, rngs)
            for block in range(self.depth)
            for target in self.targets
        }

    def _delta(self, update: LowRank, block: int, rngs: nnx.Rngs | None) -> Delta:
        # The key is drawn here, because a recomputed block must not draw another key.
        dropout = partial(self.dropout, rngs=rngs.dropout()) if drops(self.dropout) else None
        values = {name: variable[block] for name, (_, variable) in named_variables(update).items()}
        return partial(self.layer_delta, values, dropout)

    def layer_delta(self, values: Params, dropout: Dropout | None, call: LayerCall) -> jax.Array:
        """Return the delta of a layer, scale·x·A·B for x f32[b,T,inputs]. `values` are those of LowRank, by name."""
        return self.low_rank(call.tokens if dropout is None else dropout(call.tokens), values)

    def low_rank(self, tokens: jax.Array, values: Params) -> jax.Array:
        """Return scale·x·A·B for x f32[b,T,inputs]."""
        dtype = self.dtype or jnp.result_type(tokens, values["a"])
        a, b = values["a"].astype(dtype), values["b"].astype(dtype)
        return (self.scale * (tokens.astype(dtype) @ a)) @ b

    def macs(self, tokens: int) -> int:
        updates = (getattr(self, target) for target in self.targets)
        return tokens * sum(update.a.size + update.b.size for update in updates)

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        name = "rsLoRA" if settings.rank_stabilized else "LoRA"
        return f"{cls.__name__ if cls is not LoRA else name} (rank {settings.rank}; {', '.join(settings.targets)})"


class LowRank(nnx.Module):
    """The matrices A (`a`) f32[L,inputs,rank] and B (`b`) f32[L,rank,outputs] of one layer in all L blocks."""

    def __init__(self, depth: int, inputs: int, outputs: int, rank: int, *, rngs: nnx.Rngs):
        self.a = nnx.Param(torch_uniform(inputs)(rngs.params(), (depth, inputs, rank)))
        self.b = nnx.Param(jnp.zeros((depth, rank, outputs)))


class DoRA(LoRA):
    """DoRA: a low-rank update of the direction of each column of a kernel, and a learned change of its length.

    Each column of the kernel W becomes m·(W + s·A·B) / ‖W + s·A·B‖ (DoRA, eq. 5). A, B and the factor s are as in LoRA,
    ‖·‖ is the norm of a column, and m is its learned length. No gradient flows through the norm (DoRA, sec. 4.3). The
    parameter `magnitude` f32[L, outputs] is m − ‖W‖, which starts with 0 and has the gradient of m. With dropout, x·W
    is computed again from the dropped inputs, as in the authors' code.
    """

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        super().__init__(settings, shape, dtype=dtype, rngs=rngs)
        for target in self.targets:
            getattr(self, target).magnitude = nnx.Param(jnp.zeros((shape.depth, shape.layers[target].outputs)))

    def layer_delta(self, values: Params, dropout: Dropout | None, call: LayerCall) -> jax.Array:
        """Return the delta of a layer, (f − 1)·x·W + f·s·x·A·B with f = m / ‖W + s·A·B‖."""
        kernel, bias = call.weights()
        wide = kernel.astype(jnp.float32)
        length = jax.lax.stop_gradient(jnp.linalg.norm(wide + self.scale * (values["a"] @ values["b"]), axis=0))
        factor = (jnp.linalg.norm(wide, axis=0) + values["magnitude"]) / length
        if dropout is None:
            tokens = call.tokens
            output = call.output if bias is None else call.output - bias.astype(call.output.dtype)
        else:
            tokens = dropout(call.tokens)
            output = tokens.astype(call.output.dtype) @ kernel.astype(call.output.dtype)
        return (factor - 1) * output + factor * self.low_rank(tokens, values)
