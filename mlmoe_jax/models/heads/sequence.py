"""CNN-RNN: a sequence of labels, each predicted from the image and the preceding labels (Wang et al., CVPR 2016).

Shape letters in addition to `models.contracts`: T steps of a label sequence, W paths of a beam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Integer, Num
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.graph import frequency_order
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.layers.initializers import Dtype, torch_linear
from mlmoe_jax.models.outputs import CLS, Features, Prediction
from mlmoe_jax.models.partition import LABEL, axes

# (state of W paths per image, their last labels i32[B,W]) -> (new state, scores f32[B,W,K+1] of the next label). The
# last score belongs to the end of the sequence.
Advance = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
BEAM_WIDTH, DROPOUT = 4, 0.5  # the number of paths in the beam, and the dropout rate on x


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamResult:
    """The result of a beam search.

    Attributes:
      path: i32[B,max_labels], the labels of the most probable ended path, −1 after its end.
      log_probability: f32[B], the log-probability of this path with its end.
      label_logits: f32[B,K], the logit of the largest probability of each label at any step of any path in the beam.
    """

    path: jax.Array
    log_probability: jax.Array
    label_logits: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beam:
    """The state of the search between two steps. Unused paths have a log-probability of −inf.

    Attributes:
      state: see Advance.
      last: i32[B,W].
      log_p: f32[B,W].
      path: i32[B,W,max_labels].
      used: bool[B,W,K].
      result: the result of the steps before.
    """

    state: Any
    last: jax.Array
    log_p: jax.Array
    path: jax.Array
    used: jax.Array
    result: BeamResult


def log_odds(scores: Float[ArrayLike, "*rows e"]) -> Float[Array, "*rows e"]:
    """Return the logit of each softmax probability over the last axis, s_k − log Σ_{j≠k} exp s_j.

    Finite and strictly increasing in the probability, even if the probability rounds to 1.
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

    Args:
      advance: see Advance; called once per step inside `jax.lax.scan`.
      state: arrays [B,W,...], the first state for `advance`; W is the width of the beam.
      start: the token before the first label.
      labels: K.
      max_labels: the largest number of labels of a path.
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
    """End all paths, extend all paths by all labels, and keep the best. `scores` f32[B,W,K+1] are of step `time`."""
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
    """Return the result after a step with scores f32[B,W,K+1], for the paths with log_p f32[B,W] > −inf."""
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


class CNNRNNHead(Head):
    """An LSTM over label embeddings, combined with the image feature (CNN-RNN, sec. 3).

    With the embedding u of the previous label, o = LSTM(u), x = ReLU(P_o o + P_I I), and the scores are U·x, where U
    has the embeddings u (CNN-RNN, eq. 2–5). The softmax is over the K labels and the end. `embedding` f32[K+2,E] has
    the labels, the end and the start, in this order. The projections have no bias, as printed. The cell is flax's LSTM
    with tanh. The paper's formula has ReLU instead.

    Training (with labels): teacher forcing on the labels of each image by decreasing training frequency, then the end.
    `penalties["sequence"]` is −log of the probability of the sequence, the sum of the cross-entropies of its steps.
    Sequences longer than `max_labels` are truncated, without a target for the end. The logit of a label belongs to its
    largest probability at any of these steps, so logits depend on the labels.

    Otherwise: beam search. The logit of a label belongs to its largest probability at any step of any path in the beam.
    The paper predicts only the labels of the best path (`search`). This score is our convention, so that the model has
    a mean average precision.

    Args:
      width: D.
      order: the K labels by decreasing training frequency, see `data.labels.graph.frequency_order`.
      embedding: E.
      hidden: width of the state of the LSTM.
      max_labels: the largest number of labels of a sequence.
      dtype: type of the matmuls; None = float32.
      rngs: for the weights.
    """

    read = (CLS,)
    by_label = False  # labels interact, so they are replicated
    unknown_labels = "learns label sequences, in which an unknown label counts as absent"

    def __init__(
        self,
        width: int,
        order: Sequence[int],
        *,
        embedding: int = 64,
        hidden: int = 512,
        max_labels: int = 20,
        dtype: Dtype = None,
        rngs: nnx.Rngs,
    ):
        self.order = tuple(int(label) for label in order)
        self.labels = len(self.order)
        self.hidden = hidden
        self.max_labels = min(max_labels, self.labels)
        self.end = self.labels
        self.start = self.labels + 1

        def projection(inputs: int) -> nnx.Linear:
            return torch_linear(inputs, embedding, use_bias=False, dtype=dtype, rngs=rngs)

        # Embeddings have length 1 on average, so that the first scores have the scale of x.
        draw = nnx.initializers.normal(embedding**-0.5)
        self.embedding = nnx.Param(draw(rngs.params(), (self.labels + 2, embedding)), **axes(LABEL, None))
        self.lstm = nnx.OptimizedLSTMCell(embedding, hidden, dtype=dtype, rngs=rngs)
        self.state_projection = projection(hidden)
        self.image_projection = projection(width)
        self.dropout = nnx.Dropout(DROPOUT, deterministic=True)

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        return cls(width, frequency_order(space.positives), **config.model.head.sequence, dtype=dtype, rngs=rngs)

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        return ()

    def image_feature(self, features: Features) -> Float[Array, "b e"]:
        """Return P_I I, where I is the class token, or the mean of the map of a CNN."""
        return self.image_projection(features.cls).astype(jnp.float32)

    def sequence(self, labels: Num[ArrayLike, "b k"]) -> tuple[Integer[Array, "b t"], Bool[Array, "b t"]]:
        """Sort labels (present if above 0.5) by training frequency, followed by the end.

        Returns:
          The sorted labels, padded with ends to t = max_labels + 1 steps, and whether each step counts in the loss.
        """
        order = jnp.asarray(self.order)
        present = jnp.take(labels, order, axis=1) > 0.5
        ranks = jnp.argsort(~present, axis=1, stable=True)[:, : self.max_labels]
        sorted_labels = jnp.pad(order[ranks], ((0, 0), (0, 1)), constant_values=self.end)
        count = present.sum(axis=1, keepdims=True)
        step = jnp.arange(self.max_labels + 1)
        counts = (step <= count) & ((step < self.max_labels) | (count == self.max_labels))
        return jnp.where(step < count, sorted_labels, self.end), counts

    def scores(
        self, image: Float[ArrayLike, "b e"], previous: Integer[ArrayLike, "b t"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "b t _"]:
        """Return the scores of the next label after each of the labels `previous`, which begin with `start`.

        Args:
          image: the result of `image_feature`.
          previous: the preceding labels.
          rngs: for dropout in training.
        """
        inputs = jnp.moveaxis(self.embedding[...][previous], 1, 0)
        outputs = jax.lax.scan(self.lstm, self._first_state(previous.shape[:1]), inputs)[1]
        joint = self._joint(image[:, None], jnp.moveaxis(outputs, 0, 1))
        return self._scores(self.dropout(joint, rngs=rngs))

    def search(self, features: Features) -> BeamResult:
        """Return the most probable label sequence per image, and the logits of all labels, by beam search."""
        image = self.image_feature(features)[:, None]

        def advance(state: Any, label: jax.Array) -> tuple[Any, jax.Array]:
            state, output = self.lstm(state, self.embedding[...][label])
            return state, self._scores(self._joint(image, output))

        state = self._first_state((image.shape[0], BEAM_WIDTH))
        return beam_search(advance, state, start=self.start, labels=self.labels, max_labels=self.max_labels)

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        if labels is None:
            return Prediction(self.search(features).label_logits)
        targets, counts = self.sequence(labels)
        previous = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=self.start)
        scores = self.scores(self.image_feature(features), previous, rngs=rngs)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), targets[..., None], axis=-1)[..., 0]
        logits = jnp.where(counts[..., None], log_odds(scores)[..., :-1], -jnp.inf).max(axis=1)
        return Prediction(logits, penalties={"sequence": -jnp.sum(log_p, axis=1, where=counts)})

    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return the layers for one path of max_labels + 1 steps, and for the remaining W − 1 paths of the beam."""
        width, embedding = self.image_projection.kernel.shape
        step = 4 * self.hidden * (embedding + self.hidden) + self.hidden * embedding + (self.labels + 1) * embedding
        path = (self.max_labels + 1) * step
        return width * embedding + path, (BEAM_WIDTH - 1) * path

    def _first_state(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((*shape, self.hidden))
        return zeros, zeros

    def _joint(self, image: jax.Array, output: jax.Array) -> jax.Array:
        """Return x (CNN-RNN, eq. 4): f32[...,E]."""
        return jax.nn.relu(self.state_projection(output).astype(jnp.float32) + image)

    def _scores(self, joint: jax.Array) -> jax.Array:
        """Return the scores of the labels and the end (CNN-RNN, eq. 5): f32[...,E] -> f32[...,K+1]."""
        return joint @ self.embedding[: self.end + 1].T
