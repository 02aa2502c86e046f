"""A query decoder as classifier. Q2L and ML-Decoder (with full or grouped decoding) are settings of this head."""

from __future__ import annotations

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.layers.initializers import Dtype, torch_uniform
from mlmoe_jax.models.outputs import LABELS, Features, Prediction
from mlmoe_jax.models.partition import LABEL, LABEL_GROUP, axes
from mlmoe_jax.models.query_decoder import FIXED_QUERIES, STYLES, QueryDecoder, decoder_settings

# The settings of Query2Label (Liu et al., 2021) in `config.model.head.decoder`, from the authors' code for ResNet-101.
# The width is the width of the backbone.
Q2L_SETTINGS: dict[str, Any] = {"style": "q2l", "heads": 4, "hidden": 8192, "encoder_layers": 1, "decoder_layers": 2}
# The settings of ML-Decoder (Ridnik et al., WACV 2023).
ML_DECODER_SETTINGS: dict[str, Any] = {
    "style": "ml_decoder",
    "width": 768,
    "heads": 8,
    "hidden": 2048,
    "encoder_layers": 0,
    "decoder_layers": 1,
}


class GroupedClassifier(nnx.Module):
    """A classifier in which each of Q queries yields the logits of F = ⌈K/Q⌉ labels.

    The logit of label k = q·F + f is w[q,:,f]·h[q] + b[k], where h[q] is the feature of query q.

    With Q = K, this is the group-wise linear layer of Query2Label (Liu et al., 2021), one weight vector and bias per
    label. With Q < K, it is the group fully-connected layer of ML-Decoder (Ridnik et al., WACV 2023).

    Args:
      width: D.
      queries: Q.
      labels: K.
      init: `uniform`, U(±1/√D) for weights and biases (Q2L), or `xavier`, normal weights as in torch's xavier_normal
        for a tensor of this shape, and biases 0 (ML-Decoder).
      rngs: for the weights.
    """

    def __init__(self, width: int, queries: int, labels: int, *, init: str = "uniform", rngs: nnx.Rngs):
        labels_per_query = math.ceil(labels / queries)
        if init == "uniform":
            draw = torch_uniform(width)
            bias = torch_uniform(width)
        else:
            # torch's fan-in is the middle axis and its fan-out the first axis, both times the last axis.
            draw = nnx.initializers.normal(math.sqrt(2 / ((width + queries) * labels_per_query)))
            bias = nnx.initializers.zeros
        owner = LABEL if queries == labels else LABEL_GROUP
        self.kernel = nnx.Param(draw(rngs.params(), (queries, width, labels_per_query)), **axes(owner, None, None))
        self.bias = nnx.Param(bias(rngs.params(), (labels,)), **axes(LABEL))

    def __call__(self, features: Float[ArrayLike, "b q d"]) -> Float[Array, "b k"]:
        votes = jnp.einsum("bqd,qdf->bqf", features, self.kernel[...])
        return votes.reshape(votes.shape[0], -1)[:, : self.bias.size] + self.bias[...]


class DecoderHead(Head):
    """The base class of heads with a query decoder, to whose logits W·mean(patches) + b can be added.

    This linear path starts at 0. With few images it learns before the decoder does.

    Args:
      decoder: a module that maps the features in its attribute `read` to features of queries, see RoutedExpertsHead.
      labels: K.
      pooled: C of the patches for the linear path; 0 = no linear path.
      rngs: for the weights.
    """

    def __init__(self, decoder: nnx.Module, labels: int, *, pooled: int, rngs: nnx.Rngs):
        self.decoder = decoder
        self.read = decoder.read
        zeros = nnx.initializers.zeros
        metadata = {"kernel_metadata": axes(None, LABEL), "bias_metadata": axes(LABEL)}
        self.pooled = nnx.Linear(pooled, labels, kernel_init=zeros, **metadata, rngs=rngs) if pooled else None

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        return (FIXED_QUERIES,) if STYLES[config.model.head.decoder.style].fixed_queries else ()

    def with_linear_path(self, logits: Float[ArrayLike, "b k"], features: Features) -> Float[Array, "b k"]:
        """Return the logits of the decoder plus the logits of the linear path, if there is one."""
        if self.pooled is None:
            return logits
        mean = jnp.mean(features.patches.astype(jnp.float32), axis=1)
        return logits + self.pooled(partition.shard_images(mean))

    def published_macs(self, tokens: int) -> tuple[int, int]:
        layers, products = self.decoder.published_macs(tokens)
        return layers + (0 if self.pooled is None else self.pooled.kernel.size), products

    def norm_macs(self, tokens: int) -> int:
        return self.decoder.norm_macs(tokens)


def pooled_channels(config: ConfigDict, width: int) -> int:
    """Return the input width of the linear path: `width` for `config.model.head.residual=pooled`, else 0 for none."""
    return width if config.model.head.residual == "pooled" else 0


class QueryHead(DecoderHead):
    """A query decoder over the tokens of an image, and a linear classifier on the features of the queries.

    Args:
      decoder: the decoder, with at most one query per label.
      labels: K.
      classifier: `per_label` if each label has its own query; `grouped` if ⌈K/Q⌉ labels share a query. The initial
        values differ too, see GroupedClassifier.
      pooled: see DecoderHead.
      rngs: for the weights.
    """

    def __init__(
        self, decoder: QueryDecoder, labels: int, *, classifier: str = "per_label", pooled: int = 0, rngs: nnx.Rngs
    ):
        super().__init__(decoder, labels, pooled=pooled, rngs=rngs)
        queries = decoder.num_queries
        self.by_label = queries == labels
        init = "uniform" if classifier == "per_label" else "xavier"
        self.classifier = GroupedClassifier(decoder.width, queries, labels, init=init, rngs=rngs)

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        settings = config.model.head.decoder
        labels = len(space.names)
        queries = min(settings.queries or labels, labels)
        arguments = decoder_settings(settings, width) | {"owner": LABEL if queries == labels else LABEL_GROUP}
        decoder = QueryDecoder(width, queries, **arguments, dtype=dtype, rngs=rngs)
        # Initial values are as in Q2L, or as in ML-Decoder if queries are fixed.
        classifier = "grouped" if decoder.style.fixed_queries or queries < labels else "per_label"
        return cls(decoder, labels, classifier=classifier, pooled=pooled_channels(config, width), rngs=rngs)

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        label_features = self.decoder(features, rngs=rngs)
        return Prediction(self.with_linear_path(self.classifier(partition.shard_labels(label_features)), features))

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return the attention of the query of each label, `labels` f32[B,K,N], equal for labels that share a query."""
        weights = self.decoder.attention(features)
        labels = self.classifier.bias.size
        labels_per_query = self.classifier.kernel.shape[-1]
        return {LABELS: weights if labels_per_query == 1 else jnp.repeat(weights, labels_per_query, axis=1)[:, :labels]}

    def published_macs(self, tokens: int) -> tuple[int, int]:
        layers, products = super().published_macs(tokens)
        return layers + self.classifier.kernel.size, products
