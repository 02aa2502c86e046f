"""Beam search for the most probable sequence of distinct labels.

Axes: B images, W paths of a beam, K labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

# (state of W paths per image, their last labels i32[B,W]) -> (new state, scores f32[B,W,K+1] of the next label). The
# last score belongs to the end of the sequence.
Advance = Callable[[Any, jax.Array], tuple[Any, jax.Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamResult:
    """The result of a beam search.

    Attributes:
      path: i32[B,max_labels], the labels of the most probable ended path, padded with −1.
      log_probability: f32[B], of `path`, including its end.
      label_logits: f32[B,K], the logit of the largest probability of each label at any step of any path in the beam.
    """

    path: jax.Array
    log_probability: jax.Array
    label_logits: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beam:
    """The state of the search between two steps. Unused paths have a log-probability of −inf."""

    state: Any  # the state of the model, arrays [B,W,...], see Advance
    last: jax.Array  # i32[B,W], the last label of each path
    log_p: jax.Array  # f32[B,W], the log-probability of each path
    path: jax.Array  # i32[B,W,max_labels], the labels of each path, padded with −1
    used: jax.Array  # bool[B,W,K], whether a path contains a label
    result: BeamResult  # the result of all previous steps


def log_odds(scores: Float[ArrayLike, "*rows e"]) -> Float[Array, "*rows e"]:
    """Return the logit of each softmax probability over the last axis, s_k − log Σ_{j≠k} exp s_j, for scores s.

    It is finite and strictly increasing in the probability, even if the probability rounds to 1.
    """
    top = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=bool)
    others = jax.nn.logsumexp(jnp.where(top, -jnp.inf, scores), axis=-1, keepdims=True)
    # All probabilities but the largest are at most 1/2, so log(1 − p) is accurate. The constant for the largest keeps
    # the gradient of the unused branch finite.
    log_p = jnp.where(top, jnp.log(0.5), jax.nn.log_softmax(scores, axis=-1))
    return jnp.where(top, scores - others, log_p - jnp.log1p(-jnp.exp(log_p)))


def beam_search(advance: Advance, state: Any, *, start: int, labels: int, max_labels: int) -> BeamResult:
    """Find the most probable sequence of distinct labels by beam search (CNN-RNN, sec. 3.3).

    The probability of a path is the product of the softmax probabilities of its labels and its end. A label cannot
    occur twice on a path. The probabilities of all other labels are not rescaled. Each step keeps the W most probable
    extensions. Every path in the beam may also end, and leaves the beam when it ends. The search of an image stops when
    its best ended path is at least as probable as all open paths. A path of `max_labels` labels can only end.

    `advance(state, last)` is called once per step inside `jax.lax.scan`, and returns (new state, scores), see
    `Advance`. `state` is its first state, a tree of arrays [B,W,...]. `start` is the token before the first label.
    """
    batch, width = jax.tree.leaves(state)[0].shape[:2]
    none = partial(jnp.full, fill_value=-jnp.inf)
    beam = _Beam(
        state,
        jnp.full((batch, width), start),
        none((batch, width)).at[:, 0].set(0.0),
        jnp.full((batch, width, max_labels), -1),
        jnp.zeros((batch, width, labels), bool),
        BeamResult(jnp.full((batch, max_labels), -1), none((batch,)), none((batch, labels))),
    )

    def step(beam: _Beam, time: jax.Array) -> tuple[_Beam, None]:
        state, scores = advance(beam.state, beam.last)
        return _extend(beam, state, scores.astype(jnp.float32), time), None

    return jax.lax.scan(step, beam, jnp.arange(max_labels + 1))[0].result


def _extend(beam: _Beam, state: Any, scores: jax.Array, time: jax.Array) -> _Beam:
    """Return the beam after step `time`, for the scores f32[B,W,K+1] of the next label or the end.

    Every path is ended once, which updates the result, and is extended by every label. The W most probable extensions
    are kept.
    """
    (batch, width), labels = beam.log_p.shape, scores.shape[-1] - 1
    searching = beam.log_p.max(axis=1) > beam.result.log_probability
    log_p = jnp.where(searching[:, None], beam.log_p, -jnp.inf)
    result = _update(beam, log_p, scores)
    next_p = log_p[..., None] + jax.nn.log_softmax(scores, axis=-1)[..., :-1]
    next_p = jnp.where(beam.used, -jnp.inf, next_p).reshape(batch, width * labels)
    log_p, index = jax.lax.top_k(next_p, width)
    parent = index // labels
    label = index % labels

    def inherit(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, parent.reshape(batch, width, *[1] * (x.ndim - 2)), axis=1)

    return _Beam(
        jax.tree.map(inherit, state),
        label,
        log_p,
        inherit(beam.path).at[:, :, time].set(label, mode="drop"),
        inherit(beam.used) | jax.nn.one_hot(label, labels, dtype=bool),
        result,
    )


def _update(beam: _Beam, log_p: jax.Array, scores: jax.Array) -> BeamResult:
    """Return the result with the paths that end in this step. Paths with a `log_p` of −inf are ignored."""
    exists = (log_p > -jnp.inf)[..., None]
    label_logits = jnp.where(exists, log_odds(scores)[..., :-1], -jnp.inf).max(axis=1)
    ended = log_p + jax.nn.log_softmax(scores, axis=-1)[..., -1]
    best = jnp.argmax(ended, axis=1)[:, None]
    ended = jnp.take_along_axis(ended, best, axis=1)[:, 0]
    path = jnp.take_along_axis(beam.path, best[..., None], axis=1)[:, 0]
    better = ended > beam.result.log_probability
    return BeamResult(
        jnp.where(better[:, None], path, beam.result.path),
        jnp.where(better, ended, beam.result.log_probability),
        jnp.maximum(beam.result.label_logits, label_logits),
    )
