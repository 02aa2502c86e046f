"""The post-norm layers of a transformer encoder and decoder, and their attention.

They follow DETR (Carion et al., ECCV 2020), and are numerically equal to torch.nn.MultiheadAttention and to the layers
of Q2L and ML-Decoder. AttentionPool gives the `cls` of ViTs without a class token.
Axes: b batch, q queries, t keys and values, n patches, d width, h heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import Initializer
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from mlmoe_jax.models.layers.attention import FusedProjection
from mlmoe_jax.models.layers.dispatch import attend
from mlmoe_jax.models.layers.dropout import drops
from mlmoe_jax.models.layers.initializers import Dtype, torch_linear, torch_uniform
from mlmoe_jax.models.layers.recompute import LayerNorm
from mlmoe_jax.models.layers.softmax_attention import attention_weights
from mlmoe_jax.models.layers.transformer import MLPS, Mlp

TORCH_EPSILON = 1e-5


class QueryAttention(nnx.Module):
    """Multi-head attention, softmax(QKᵀ/√d)·V, with h heads of width d = D/h (Transformer, eq. 1).

    Queries Q, keys K and values V are projected from separate inputs, by the columns of one matrix, in this order, and
    with biases. In training, `dropout` applies to the attention weights, as in torch.nn.MultiheadAttention.
    """

    def __init__(
        self, width: int, heads: int, *, dropout: float = 0.0, init: str = "xavier", dtype: Dtype = None, rngs: nnx.Rngs
    ):
        self.heads = heads
        xavier = nnx.initializers.xavier_uniform()
        self.qkv = FusedProjection(width, kernel_init=xavier, dtype=dtype, rngs=rngs)
        self.proj = nnx.Linear(width, width, kernel_init=_matrix(init, width), dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    def __call__(
        self,
        query: Float[ArrayLike, "#b q d"],
        key: Float[ArrayLike, "#b t d"],
        value: Float[ArrayLike, "#b t d"],
        *,
        mask: Bool[np.ndarray, "q t"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "#b q d"]:
        """Attend from queries to keys and values; `mask` is True if a query may attend to a key, None = all True."""
        query, key, value = self._project(query, "query"), self._project(key, "key"), self._project(value, "value")
        if not drops(self.dropout):
            mixed = attend(query, key, value, mask)
        else:
            weights = self.dropout(attention_weights(query, key, mask), rngs=rngs)
            mixed = jnp.einsum("bhqt,bthd->bqhd", weights.astype(value.dtype), value)
        return self.proj(mixed.reshape(*mixed.shape[:2], -1))

    def _project(self, tokens: jax.Array, part: str) -> jax.Array:
        """Project f32[b,T,D] to queries, keys or values f32[b,T,h,d]; `part` is an element of PARTS."""
        result = self.qkv.project(tokens, self.qkv.columns(part))
        return result.reshape(*tokens.shape[:2], self.heads, -1)


def _feed_forward(width: int, hidden: int, *, dropout: float, init: str, dtype: Dtype, rngs: nnx.Rngs) -> Mlp:
    def linear(inputs: int, outputs: int, **settings: Any) -> nnx.Linear:
        return torch_linear(inputs, outputs, kernel_init=_matrix(init, inputs), **settings)

    return Mlp(width, hidden, activation=jax.nn.relu, dropout=dropout, linear=linear, dtype=dtype, rngs=rngs)


def _matrix(init: str, fan_in: int) -> Initializer:
    return nnx.initializers.xavier_uniform() if init == "xavier" else torch_uniform(fan_in)


class EncoderLayer(nnx.Module):
    """Self-attention of patches and a feed-forward layer, each with dropout, a residual connection and a norm."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        dropout: float,
        attention_dropout: float,
        init: str,
        dtype: Dtype,
        rngs: nnx.Rngs,
    ):
        shared = {"init": init, "dtype": dtype, "rngs": rngs}
        self.attn = QueryAttention(width, heads, dropout=attention_dropout, **shared)
        self.mlp = _feed_forward(width, hidden, dropout=dropout, **shared)
        self.norm1, self.norm2 = (LayerNorm(width, epsilon=TORCH_EPSILON, rngs=rngs) for _ in range(2))
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    def __call__(
        self,
        tokens: Float[ArrayLike, "b n d"],
        positions: Float[ArrayLike, "1 n d"] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b n d"]:
        """Apply the layer. Positions are added to queries and keys, not to values."""
        query = add_positions(tokens, positions)
        tokens = self.norm1(tokens + self.dropout(self.attn(query, query, tokens, rngs=rngs), rngs=rngs))
        return self.norm2(tokens + self.dropout(self.mlp(tokens, rngs=rngs), rngs=rngs))


class DecoderLayer(nnx.Module):
    """Self-attention of queries, cross-attention to the memory, and a feed-forward layer.

    Args:
      self_attention: `on`; `off`, without self-attention and its norm; or `identity`, which replaces the output of
        self-attention by the input tokens and keeps the residual connection and the norm.
      init: initializer of the matrices: `xavier` (Xavier uniform) or `torch` (as torch.nn.Linear).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        self_attention: str,
        dropout: float,
        attention_dropout: float,
        init: str,
        dtype: Dtype,
        rngs: nnx.Rngs,
    ):
        shared = {"init": init, "dtype": dtype, "rngs": rngs}
        attention = {"dropout": attention_dropout, **shared}
        self.self_attn = QueryAttention(width, heads, **attention) if self_attention == "on" else None
        self.norm1 = None if self_attention == "off" else LayerNorm(width, epsilon=TORCH_EPSILON, rngs=rngs)
        self.cross_attn = QueryAttention(width, heads, **attention)
        self.mlp = _feed_forward(width, hidden, dropout=dropout, **shared)
        self.norm2, self.norm3 = (LayerNorm(width, epsilon=TORCH_EPSILON, rngs=rngs) for _ in range(2))
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    def __call__(
        self,
        tokens: Float[ArrayLike, "#b q d"],
        positions: Float[ArrayLike, "1 q d"] | None,
        memory: Float[ArrayLike, "#b t d"],
        keys: Float[ArrayLike, "#b t d"],
        *,
        mask: Bool[np.ndarray, "q t"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "#b q d"]:
        """Apply the layer to queries, with the values `memory` and the `keys` of cross-attention.

        `positions` are added to the queries of both attentions and to the keys of self-attention; None = no positions.
        `mask` is True if a query may attend to a token of the memory; None = all True.
        """
        if self.norm1 is not None:
            queries = add_positions(tokens, positions)
            mixed = tokens if self.self_attn is None else self.self_attn(queries, queries, tokens, rngs=rngs)
            tokens = self.norm1(tokens + self.dropout(mixed, rngs=rngs))
        attended = self.cross_attn(add_positions(tokens, positions), keys, memory, mask=mask, rngs=rngs)
        tokens = self.norm2(tokens + self.dropout(attended, rngs=rngs))
        return self.norm3(tokens + self.dropout(self.mlp(tokens, rngs=rngs), rngs=rngs))


def add_positions(tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Return `tokens` + `positions`, or `tokens` if `positions` is None."""
    return tokens if positions is None else tokens + positions


class AttentionPool(nnx.Module):
    """A pooling layer over patches, y + MLP(LN y), for the attention y from one learned query to the patches.

    The query is not added to y. The MAP head of Zhai et al., "Scaling vision transformers" (CVPR 2022), as in SigLIP.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, mlp: str, eps: float, dtype: Dtype, rngs: nnx.Rngs):
        self.query = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (1, 1, width)))
        self.attn = QueryAttention(width, heads, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(width, epsilon=eps, rngs=rngs)
        self.mlp = MLPS[mlp](width, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, patches: jax.Array) -> jax.Array:
        """Return the pooled feature f32[B,D] of patches f32[B,N,D]."""
        pooled = self.attn(self.query[...], patches, patches).astype(jnp.float32)
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]
