"""CNN-RNN: a sequence of labels, each predicted from the image and the preceding labels (Wang et al., CVPR 2016).

Shape letters in addition to `models.contracts`: T steps of a label sequence, W paths of a beam.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from mlmoe_jax.models.layers.beam_search import BeamResult, beam_search, log_odds
from mlmoe_jax.models.layers.initializers import Dtype, torch_linear
from mlmoe_jax.models.outputs import CLS, Features, Prediction
from mlmoe_jax.models.partition import LABEL, axes

BEAM_WIDTH = 4  # paths in the beam
DROPOUT = 0.5  # dropout rate on x


class CNNRNNHead(Head):
    """An LSTM over label embeddings, combined with the image feature (CNN-RNN, sec. 3).

    Each step computes the scores of the next label (CNN-RNN, eq. 2–5). u is the embedding of the previous label, and o
    = LSTM(u) is the output of the LSTM. The joint feature is x = ReLU(P_o·o + P_I·I), where I is the image feature and
    P_o and P_I are learned projections without bias, as printed. The scores are U·x, where the rows of U are the
    embeddings. The softmax is over the K labels and the end of the sequence. The parameter `embedding` f32[K+2,E] has
    rows for the K labels, the end and the start, in this order. The cell is Flax's LSTM with tanh. The paper's formula
    has ReLU instead.

    Training (`labels` is not None) uses teacher forcing. The target sequence has the labels of the image by decreasing
    training frequency, followed by the end. `penalties["sequence"]` is the negative log-probability of the target
    sequence, which is the sum of the cross-entropies of its steps. A sequence of more than `max_labels` labels is
    truncated, and the end is then no target. The output for a label is log(p / (1 − p)), where p is its largest
    probability over the steps, so the outputs depend on `labels`.

    Evaluation (`labels` is None) uses beam search. The logit of a label is the logit of its largest probability at any
    step of any path in the beam. This score is our convention, so that a mean average precision can be computed. The
    paper predicts only the labels of the best path, which `search` returns.

    Args:
      order: the K labels by decreasing training frequency, see `data.labels.graph.frequency_order`.
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
        """Return P_I·I, of the class token or, for a CNN, the mean of the feature map."""
        return self.image_projection(features.cls).astype(jnp.float32)

    def sequence(self, labels: Num[ArrayLike, "b k"]) -> tuple[Integer[Array, "b t"], Bool[Array, "b t"]]:
        """Return the target sequences of images, and a mask of the steps that are included in the loss.

        A sequence has the present labels, with a value above 0.5, by decreasing training frequency, padded with the
        number of the end to t = max_labels + 1 steps.
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
        """Return the scores of the K labels and the end at each of t steps, f32[B,t,K+1], for `image_feature`.

        `previous` is the label before each step. The first is `self.start`.
        """
        inputs = jnp.moveaxis(self.embedding[...][previous], 1, 0)
        outputs = jax.lax.scan(self.lstm, self._first_state(previous.shape[:1]), inputs)[1]
        joint = self._joint(image[:, None], jnp.moveaxis(outputs, 0, 1))
        return self._scores(self.dropout(joint, rngs=rngs))

    def search(self, features: Features) -> BeamResult:
        """Return the most probable label sequence of each image and the logits of all labels, from a beam search."""
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

    def published_macs(self, tokens: int, counted: int) -> tuple[int, int]:
        """Return the multiply-adds for (the image and one path of max_labels + 1 steps, the other W − 1 paths)."""
        image = self.image_projection.kernel.size
        path = (counted - image) // BEAM_WIDTH
        return image + path, (BEAM_WIDTH - 1) * path

    def _first_state(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros((*shape, self.hidden))
        return zeros, zeros

    def _joint(self, image: jax.Array, output: jax.Array) -> jax.Array:
        """Return the joint feature x f32[...,E] (CNN-RNN, eq. 4) of a projected image feature and an LSTM output."""
        return jax.nn.relu(self.state_projection(output).astype(jnp.float32) + image)

    def _scores(self, joint: jax.Array) -> jax.Array:
        """Return the scores f32[...,K+1] of the labels and the end for joint features f32[...,E] (CNN-RNN, eq. 5)."""
        return joint @ self.embedding[: self.end + 1].T
