"""Attention pooling of the patches, the output of vision transformers without a class token."""

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.models.layers.detr import QueryAttention
from mlmoe_jax.models.layers.transformer import MLPS, layer_norm


class AttentionPool(nnx.Module):
    """y + MLP(LN y), where y is the attention of one learned query over the patches; the query is not added to y.

    The MAP head of Zhai et al., "Scaling vision transformers" (CVPR 2022), as in SigLIP.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, mlp: str, eps: float, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ):
        self.query = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (1, 1, width)))
        self.attn = QueryAttention(width, heads, dtype=dtype, rngs=rngs)
        self.norm = layer_norm(width, eps, rngs)
        self.mlp = MLPS[mlp](width, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, patches: jax.Array) -> jax.Array:
        """f32[B,N,D] -> f32[B,D]."""
        pooled = self.attn(self.query[...], patches, patches).astype(jnp.float32)
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]

    def weights(self, patches: jax.Array) -> jax.Array:
        """Return the attention of the query over the patches, averaged over heads: f32[B,N,D] -> f32[B,1,N]."""
        return self.attn.weights(self.query[...], patches).mean(axis=1)
