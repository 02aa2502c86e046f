"""The implementations of softmax(QKᵀ/√d)·V, between which `layers.dispatch.attend` chooses.

Shape letters: B batch, Q queries, T keys and values, h heads of width d. Each leading size b is B or 1.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe_jax.models.layers.recompute import in_backward_pass

Mask = np.ndarray | jax.Array  # bool[Q,T] or [1 or B,1 or h,Q,T], True if a query may attend to a key; None = all True


def attention_weights(query: jax.Array, key: jax.Array, mask: Mask | None) -> jax.Array:
    """Return softmax(QKᵀ/√d), in float32: queries [b,Q,h,d] and keys [b,T,h,d] -> f32[B,h,Q,T]."""
    query, key = (part.swapaxes(1, 2) for part in broadcast_batch(query, key))
    return _weights(query, key, mask)


def attend_by_xla(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None) -> jax.Array:
    """Return `jax.nn.dot_product_attention` [B,Q,h,d] of queries [B,Q,h,d] to keys and values [B,T,h,d]."""
    mask = None if mask is None else jnp.asarray(mask)[(None,) * (4 - mask.ndim)]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")


def attend_by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array, mask: None) -> jax.Array:
    """Return the attention [B,Q,h,d], computed by cuDNN, of queries [B,Q,h,d] to keys and values [B,T,h,d].

    No matrix [B,h,Q,T] is formed in memory. cuDNN takes masks of our form only as a matrix [Q,T] that is added to the
    logits, so `mask` must be None. The backward pass of cuDNN supports only even Q and T. Odd numbers of tokens are
    therefore padded, and the padding is masked by the arguments for sequence lengths.
    """
    lengths = [jnp.full(part.shape[0], part.shape[1], jnp.int32) for part in (query, key)]
    odd = query.shape[1] % 2 or key.shape[1] % 2
    settings = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True)) if odd else {}
    padded = (jnp.pad(part, ((0, 0), (0, part.shape[1] % 2), (0, 0), (0, 0))) for part in (query, key, value))
    mixed = jax.nn.dot_product_attention(*padded, implementation="cudnn", **settings)
    return mixed[:, : query.shape[1]]


def attend_by_matmuls(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None) -> jax.Array:
    """Return the attention [B,Q,h,d] of queries [B,Q,h,d] to keys and values [B,T,h,d].

    Only reverse-mode differentiation is possible. The backward pass computes the attention weights again.
    """
    query, key, value = (part.swapaxes(1, 2) for part in (query, key, value))
    return _attend(query, key, value, mask).swapaxes(1, 2)


@jax.custom_vjp
def _attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None) -> jax.Array:
    """Return softmax(QKᵀ/√d)·V, heads first: [B,h,Q,d], [B,h,T,d] -> [B,h,Q,d].

    With heads first, all products and their gradients are matmuls without a transposed copy of the weights [B,h,Q,T],
    the largest array. The backward pass recomputes the weights with one more matmul, so that the memory of a step does
    not grow with the weights of all blocks.
    """
    return _attend_forward(query, key, value, mask)[0]


def _attend_forward(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None) -> tuple[jax.Array, tuple]:
    mixed = jnp.einsum("bhqt,bhtd->bhqd", _weights(query, key, mask).astype(value.dtype), value)
    return mixed, (query, key, value, mask, mixed)


def _attend_backward(residuals: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, mask, mixed = residuals
    weights = _weights(in_backward_pass(query, slope), key, mask).astype(value.dtype)
    # Σ_t (weights · slope of weights) for each query, from the smaller arrays (FlashAttention, eq. 4)
    common = jnp.sum(slope.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1, keepdims=True)
    weights_slope = jnp.einsum("bhqd,bhtd->bhqt", slope, value, preferred_element_type=jnp.float32)
    scores_slope = (weights * (weights_slope - common)).astype(query.dtype)
    if mask is not None:  # needed for a query without any allowed key, whose weights are equal
        scores_slope = jnp.where(mask, scores_slope, 0)
    scale = _scale(query)
    return (
        jnp.einsum("bhqt,bhtd->bhqd", scores_slope, key) * scale,
        jnp.einsum("bhqt,bhqd->bhtd", scores_slope, query) * scale,
        jnp.einsum("bhqt,bhqd->bhtd", weights, slope),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _weights(query: jax.Array, key: jax.Array, mask: Mask | None) -> jax.Array:
    """Return softmax(QKᵀ/√d) in float32, heads first: [B,h,Q,d], [B,h,T,d] -> f32[B,h,Q,T]."""
    scores = jnp.einsum("bhqd,bhtd->bhqt", query * _scale(query), key, preferred_element_type=jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def _scale(query: jax.Array) -> jax.Array:
    """Return 1/√d in the type of `query`. The queries are scaled instead of the scores, which are a larger array."""
    return jnp.asarray(query.shape[-1] ** -0.5, query.dtype)


def broadcast_batch(*parts: jax.Array) -> list[jax.Array]:
    """Return the arrays [b,…], where each b is 1 or B, broadcast to [B,…]."""
    (batch,) = jnp.broadcast_shapes(*(part.shape[:1] for part in parts))
    return [jnp.broadcast_to(part, (batch, *part.shape[1:])) for part in parts]


def concatenate_tokens(parts: Sequence[jax.Array]) -> jax.Array:
    """Concatenate arrays [b,T,D] along T, where each b is 1 or B."""
    return jnp.concatenate(broadcast_batch(*parts), axis=1)
