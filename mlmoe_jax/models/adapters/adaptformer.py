"""AdaptFormer: a bottleneck beside the MLP of each block of a frozen ViT (Chen et al., NeurIPS 2022)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models.contracts import Adapter, BackboneShape
from mlmoe_jax.models.layers.deltas import Deltas, LayerCall, layer_path
from mlmoe_jax.models.layers.dropout import drops
from mlmoe_jax.models.layers.initializers import Dtype, torch_uniform
from mlmoe_jax.models.layers.transformer import BRANCH, MLP

INPUTS = {"normed": MLP, "residual": BRANCH}


class AdaptFormer(Adapter):
    """AdaptFormer: adds scale·(ReLU(x·D + d)·U + u) to the output of the MLP of every block.

    Let x′ be the tokens before the norm of the MLP. With `input=normed`, x is the input of the MLP, LN(x′)
    (AdaptFormer, sec. 3.2). With `input=residual`, x is x′, as in the authors' code. D f32[L, width, bottleneck] starts
    as in the authors' code, and d, U and u with zeros, so that the features do not change at first. The paths begin
    with `adapters/adaptformer/`.
    """

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        depth = shape.depth
        width = shape.width
        hidden = settings.bottleneck
        self.depth = depth
        self.dtype = dtype
        self.scale = settings.scale
        self.layer = INPUTS[settings.input]
        self.dropout = nnx.Dropout(settings.dropout, deterministic=True)
        self.down = nnx.Param(torch_uniform(width)(rngs.params(), (depth, width, hidden)))
        self.down_bias = nnx.Param(jnp.zeros((depth, hidden)))
        self.up = nnx.Param(jnp.zeros((depth, hidden, width)))
        self.up_bias = nnx.Param(jnp.zeros((depth, width)))

    def deltas(self, *, rngs: nnx.Rngs | None = None) -> Deltas:
        # Keys are drawn here, because a recomputed block must not draw another key.
        keys = [rngs.dropout() if drops(self.dropout) else None for _ in range(self.depth)]
        return {layer_path(block, self.layer): partial(self._delta, block, key) for block, key in enumerate(keys)}

    def _delta(self, block: int, key: jax.Array | None, call: LayerCall) -> jax.Array:
        dtype = self.dtype or jnp.float32
        down, up, down_bias, up_bias = (
            value[block].astype(dtype) for value in (self.down, self.up, self.down_bias, self.up_bias)
        )
        hidden = jax.nn.relu(call.tokens.astype(dtype) @ down + down_bias)
        hidden = hidden if key is None else self.dropout(hidden, rngs=key)
        return self.scale * (hidden @ up + up_bias)

    def macs(self, tokens: int) -> int:
        return tokens * (self.down.size + self.up.size)

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        return f"AdaptFormer (bottleneck {settings.bottleneck})"
