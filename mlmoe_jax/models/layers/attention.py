"""Multi-head attention where some tokens provide keys and values only."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def attention_weights(query: jax.Array, key: jax.Array, mask: np.ndarray | jax.Array | None) -> jax.Array:
    """Return softmax(QKᵀ/√d), in float32: queries [b,Q,h,d] and keys [b,T,h,d] -> f32[B,h,Q,T].

    mask: bool[Q,T], True if a query may attend to a key; None = all may. Each leading size b is B or 1.
    """
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


class FusedProjection(nnx.Linear):
    """One linear layer for queries, keys and values (columns in that order); the queries can be omitted."""

    def key_value(self, tokens: jax.Array) -> jax.Array:
        """Project f32[b,T,D] to keys and values only, f32[b,T,2D]."""
        width = self.in_features
        kernel, bias = self.kernel[:, width:], self.bias[width:]
        dtype = self.dtype or jnp.result_type(tokens, kernel)
        return jnp.dot(tokens.astype(dtype), kernel.astype(dtype)) + bias.astype(dtype)


class Attention(nnx.Module):
    """Softmax attention with scale 1/√(head width) and a fused projection of queries, keys and values, with bias."""

    def __init__(self, width: int, heads: int, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        self.heads = heads
        self.qkv = FusedProjection(width, 3 * width, dtype=dtype, rngs=rngs)
        self.proj = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        context: Sequence[jax.Array] = (),
        mask: np.ndarray | jax.Array | None = None,
        *,
        key_value: jax.Array | None = None,
        temperature: jax.Array | float = 1.0,
    ) -> jax.Array:
        """Attend from `tokens` to themselves, to `context` and to `key_value`.

        tokens: f32[b,Q,D], which provide queries, keys and values. context: arrays f32[b,C,D], which provide keys and
        values only. key_value: f32[1 or 2, m, D], additional keys and values that are not projected (with 1, both are
        the same). Each leading size b is B or 1; arrays with 1 are projected once for the whole batch.
        mask: bool[Q,T], T = Q plus all C plus m in order, True if a query may attend to a key; None = all may.
        temperature: divides the attention logits. Returns f32[B,Q,D].
        """
        query, key, value = self._project(tokens, context, key_value, temperature)
        if query.dtype == jnp.float16:  # JAX's own attention asks for a product of float16 that only GPUs have
            weights = attention_weights(query, key, mask).astype(value.dtype)
            mixed = jnp.einsum("bhqt,bthd->bqhd", weights, value)
        else:
            mixed = jax.nn.dot_product_attention(query, key, value, mask=None if mask is None else mask[None, None])
        return self.proj(mixed.reshape(*mixed.shape[:2], -1))

    def weights(
        self,
        tokens: jax.Array,
        context: Sequence[jax.Array] = (),
        mask: np.ndarray | jax.Array | None = None,
        *,
        key_value: jax.Array | None = None,
        temperature: jax.Array | float = 1.0,
    ) -> jax.Array:
        """Return the attention weights f32[B,h,Q,T] of `tokens`; the arguments are those of `__call__`."""
        query, key, _ = self._project(tokens, context, key_value, temperature)
        return attention_weights(query, key, mask)

    def _project(
        self,
        tokens: jax.Array,
        context: Sequence[jax.Array],
        key_value: jax.Array | None,
        temperature: jax.Array | float,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries f32[B,Q,h,d], keys and values f32[B,T,h,d]."""
        query, key, value = jnp.split(self.qkv(tokens), 3, axis=-1)
        pairs = [(key, value), *(jnp.split(self.qkv.key_value(part), 2, axis=-1) for part in context)]
        if key_value is not None:
            pairs.append((key_value[:1].astype(key.dtype), key_value[-1:].astype(key.dtype)))
        batch = max(key.shape[0] for key, _ in pairs)
        key, value = (
            jnp.concatenate([jnp.broadcast_to(part, (batch, *part.shape[1:])) for part in parts], axis=1)
            for parts in zip(*pairs, strict=True)
        )
        query = jnp.broadcast_to(query / jnp.asarray(temperature, query.dtype), (batch, *query.shape[1:]))
        return tuple(
            part.reshape(*part.shape[:2], self.heads, part.shape[-1] // self.heads) for part in (query, key, value)
        )
