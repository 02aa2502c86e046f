"""Multi-head self-attention, with optional context tokens that provide only keys and values."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.layers.deltas import NO_DELTAS, Deltas, add_delta, call_layer
from mlmoe_jax.models.layers.dispatch import attend
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.layers.softmax_attention import concatenate_tokens

PARTS = ("query", "key", "value")  # the columns of a FusedProjection


def apply_rotary(tokens: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate queries or keys [B,T,h,d] by the angles f32[T,d/2] of their tokens, in float32.

    Angle c of a token rotates the pair of channels c and c + d/2 of each head. RoFormer, eq. 34, rotates pairs of
    adjacent channels instead.
    """
    cosine = jnp.cos(angles)[:, None]
    sine = jnp.sin(angles)[:, None]
    low, high = jnp.split(tokens.astype(jnp.float32), 2, axis=-1)
    result = jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    return result.astype(tokens.dtype)


class FusedProjection(nnx.Linear):
    """One linear layer whose columns are for queries, keys and values, in this order.

    Without `key_bias`, keys have no bias, and `bias` is f32[2D]. `settings` are arguments of nnx.Linear.
    """

    def __init__(self, width: int, *, key_bias: bool = True, rngs: nnx.Rngs, **settings: Any):
        super().__init__(width, 3 * width, rngs=rngs, **settings)
        self.key_bias = key_bias
        if not key_bias:
            self.bias = nnx.Param(self.bias[width:])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Project f32[b,T,D] to queries, keys and values, f32[b,T,3D]."""
        return self.project(tokens, slice(None))

    def key_value(self, tokens: jax.Array) -> jax.Array:
        """Project f32[b,T,D] to keys and values only, f32[b,T,2D]."""
        return self.project(tokens, slice(self.in_features, None))

    def project(self, tokens: jax.Array, columns: slice) -> jax.Array:
        """Project f32[b,T,D] with only `columns` of the kernel, such as `self.columns("key")`."""
        kernel = self.kernel[:, columns]
        dtype = self.dtype or jnp.result_type(tokens, kernel)
        return jnp.dot(tokens.astype(dtype), kernel.astype(dtype)) + self._full_bias()[columns].astype(dtype)

    def _full_bias(self) -> jax.Array:
        bias = self.bias[...]
        if self.key_bias:
            return bias
        query, value = jnp.split(bias, 2)
        return jnp.concatenate([query, jnp.zeros_like(query), value])

    def part(self, name: str) -> tuple[jax.Array, jax.Array]:
        """Return the kernel f32[D,D] and the bias f32[D], zeros if missing, of `name`, an element of PARTS."""
        columns = self.columns(name)
        return self.kernel[:, columns], self._full_bias()[columns]

    def columns(self, name: str) -> slice:
        """Return the columns of the kernel that belong to `name`, an element of PARTS."""
        first = PARTS.index(name) * self.in_features
        return slice(first, first + self.in_features)

    def bias_entries(self, name: str) -> slice | None:
        """Return the entries of `bias` that belong to an element of PARTS; None for keys without a bias."""
        if self.key_bias:
            return self.columns(name)
        return {"query": slice(0, self.in_features), "key": None, "value": slice(self.in_features, None)}[name]


class Attention(nnx.Module):
    """Softmax attention with scale 1/√(head width) and a FusedProjection of queries, keys and values."""

    def __init__(self, width: int, heads: int, *, key_bias: bool = True, dtype: Dtype = None, rngs: nnx.Rngs):
        self.heads = heads
        self.qkv = FusedProjection(width, key_bias=key_bias, dtype=dtype, rngs=rngs)
        self.proj = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        context: Sequence[jax.Array] = (),
        mask: np.ndarray | jax.Array | None = None,
        *,
        rotary: jax.Array | None = None,
        temperature: jax.Array | float | None = None,
        deltas: Deltas = NO_DELTAS,
        **settings: Any,
    ) -> jax.Array:
        """Return f32[B,Q,D], the attention of `tokens` to all tokens and to `key_value`, after the output projection.

        The batch size b of each array is B or 1. Arrays with b = 1 are projected once for the whole batch. The T keys
        are the Q keys of `tokens`, the C keys of each array of `context`, and the m keys of `key_value`, in this order.

        Args:
          tokens: f32[b,Q,D], which provide queries, keys and values.
          context: arrays f32[b,C,D], which provide only keys and values.
          mask: bool[Q,T], True if a query may attend to a key; None = all True.
          rotary: f32[T,d/2], the angles that rotate the keys, the first Q also the queries; a token with angles 0 is
            not rotated. None = no rotation.
          temperature: divides the attention logits; None = no division.
          deltas: deltas of the layers `query`, `key`, `value` and `output`.
          **settings: `key_value` f32[1 or 2, m, D], additional keys and values, unprojected; with 1, the keys are also
            the values. None has no effect. `spare`, the number of last tokens that are not keys, whose angles come
            after all others.
        """
        query, key, value = self._project(tokens, context, deltas=deltas, **settings)
        if temperature is not None:  # in float32, because bfloat16 would lose changes of a temperature below 0.4 %
            query = (query.astype(jnp.float32) / temperature).astype(query.dtype)
        query = jnp.broadcast_to(query, (key.shape[0], *query.shape[1:]))
        query, key, value = (
            part.reshape(*part.shape[:2], self.heads, part.shape[-1] // self.heads) for part in (query, key, value)
        )
        if rotary is not None:
            query, key = (apply_rotary(part, rotary[: part.shape[1]]) for part in (query, key))
        mixed = attend(query, key, value, mask)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        return call_layer(self.proj, mixed, "output", deltas)

    def _project(
        self,
        tokens: jax.Array,
        context: Sequence[jax.Array],
        *,
        key_value: jax.Array | None = None,
        spare: int = 0,
        deltas: Deltas = NO_DELTAS,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries f32[b,Q,D] of `tokens`, and all keys and values f32[B,T,D]."""
        query, *pair = jnp.split(self.qkv(tokens), 3, axis=-1)
        query = self._add_delta(query, "query", tokens, deltas)
        pairs = [(tokens, pair), *((part, jnp.split(self.qkv.key_value(part), 2, axis=-1)) for part in context)]
        keys = [self._add_delta(key, "key", part, deltas) for part, (key, _) in pairs]
        values = [self._add_delta(value, "value", part, deltas) for part, (_, value) in pairs]
        if spare:  # on a GPU, the kernel that joins all keys slices them
            keys[0], values[0] = (part[:, :-spare] for part in (keys[0], values[0]))
        if key_value is not None:
            keys.append(key_value[:1].astype(query.dtype))
            values.append(key_value[-1:].astype(query.dtype))
        return query, concatenate_tokens(keys), concatenate_tokens(values)

    def _add_delta(self, output: jax.Array, name: str, tokens: jax.Array, deltas: Deltas) -> jax.Array:
        return add_delta(output, name, tokens, deltas, partial(self.qkv.part, name))
