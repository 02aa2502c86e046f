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
from mlmoe_jax.models.heads.linear import LabelClassifier, label_linear
from mlmoe_jax.models.layers.initializers import Dtype, torch_uniform
from mlmoe_jax.models.outputs import LABELS, Features, Prediction
from mlmoe_jax.models.partition import LABEL, LABEL_GROUP, axes
from mlmoe_jax.models.query_decoder import FIXED_QUERIES, STYLES, QueryDecoder

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
    """A classifier that computes the logits of K labels from the features of Q queries.

    Each query yields the logits of F = ⌈K/Q⌉ labels. The logit of label k = q·F + f is w[q,:,f]·h[q] + b[k], where w is
    the weight array [Q,D,F], h[q] is the feature of query q, and b is the bias [K].

    With Q = K, this is the group-wise linear layer of Query2Label (Liu et al., 2021), which has one weight vector and
    one bias per label. With Q < K, it is the group fully-connected layer of ML-Decoder (Ridnik et al., WACV 2023).

    Args:
      init: `uniform` draws weights and biases from U(±1/√D), as in Q2L. `xavier` draws normal weights as torch's
        xavier_normal does for a tensor of this shape, and biases start at 0, as in ML-Decoder.
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
        self.macs = self.kernel.size  # multiply-adds per image

    def __call__(self, features: Float[ArrayLike, "b q d"]) -> Float[Array, "b k"]:
        votes = jnp.einsum("bqd,qdf->bqf", features, self.kernel[...])
        return votes.reshape(votes.shape[0], -1)[:, : self.bias.size] + self.bias[...]


class DecoderHead(Head):
    """The base class of heads with a query decoder and an optional linear path.

    The linear path adds W·mean(patches) + b to the logits of the decoder. W and b start at 0. With few training images,
    the linear path learns faster than the decoder.

    Args:
      decoder: a module that returns features of queries, see RoutedExpertsHead. Its attribute `read` has the names of
        the backbone features that it needs.
      pooled: the width C of the patch features, for the linear path; 0 = no linear path.
    """

    def __init__(self, decoder: nnx.Module, labels: int, *, pooled: int, rngs: nnx.Rngs):
        self.decoder = decoder
        self.read = decoder.read
        zeros = {"kernel_init": nnx.initializers.zeros, "bias_init": nnx.initializers.zeros}
        self.pooled = label_linear(pooled, labels, **zeros, rngs=rngs) if pooled else None

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        return (FIXED_QUERIES,) if STYLES[config.model.head.decoder.style].fixed_queries else ()

    @classmethod
    def mixes_labels(cls, config: ConfigDict) -> bool:
        return STYLES[config.model.head.decoder.style].self_attention == "on"

    def with_linear_path(self, logits: Float[ArrayLike, "b k"], features: Features) -> Float[Array, "b k"]:
        """Return `logits` plus the logits of the linear path, if there is one."""
        if self.pooled is None:
            return logits
        mean = jnp.mean(features.patches.astype(jnp.float32), axis=1)
        return logits + self.pooled(partition.shard_images(mean))

    def published_macs(self, tokens: int, counted: int) -> tuple[int, int]:
        """Return the multiply-adds of (linear layers and norms, the matmuls of attention, experts and gates)."""
        layers = self.decoder.layer_macs(tokens) + self.classifier.macs
        layers += 0 if self.pooled is None else self.pooled.kernel.size
        return layers, counted + self.norm_macs(tokens) - layers

    def norm_macs(self, tokens: int) -> int:
        return self.decoder.norm_macs(tokens)


def pooled_channels(config: ConfigDict, width: int) -> int:
    """Return `pooled` of DecoderHead: `width` if `config.model.head.residual` is "pooled", else 0."""
    return width if config.model.head.residual == "pooled" else 0


class QueryHead(DecoderHead):
    """A query decoder over the tokens of an image, and a linear classifier on the features of the queries.

    The decoder has at most one query per label. `classifier` is one of these: `per_label`, for one query per label, is
    a GroupedClassifier with `init="uniform"`. `grouped`, for fixed queries or if ⌈K/Q⌉ labels share a query, is a
    GroupedClassifier with `init="xavier"`. `shared`, for queries from label names, is a LabelClassifier with one weight
    vector for all labels.
    """

    def __init__(
        self, decoder: QueryDecoder, labels: int, *, classifier: str = "per_label", pooled: int = 0, rngs: nnx.Rngs
    ):
        super().__init__(decoder, labels, pooled=pooled, rngs=rngs)
        queries = decoder.num_queries
        self.labels = labels
        self.by_label = queries == labels
        if classifier == "shared":
            self.classifier = LabelClassifier(decoder.width, labels, share="shared", rngs=rngs)
        else:
            init = "uniform" if classifier == "per_label" else "xavier"
            self.classifier = GroupedClassifier(decoder.width, queries, labels, init=init, rngs=rngs)

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        settings = config.model.head.decoder
        labels = len(space.names)
        queries = min(settings.queries or labels, labels)
        options = {"owner": LABEL if queries == labels else LABEL_GROUP, "names": space.name_vectors, "dtype": dtype}
        decoder = QueryDecoder(width, queries, settings, **options, rngs=rngs)
        # Initial values are as in Q2L, or as in ML-Decoder if queries are fixed.
        classifier = "grouped" if decoder.style.fixed_queries or queries < labels else "per_label"
        if decoder.by_name:
            classifier = "shared"
        return cls(decoder, labels, classifier=classifier, pooled=pooled_channels(config, width), rngs=rngs)

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        if config.model.head.decoder.queries and config.model.head.names:
            return ["model.head.decoder.queries must be 0, a query per label, with model.head.names"]
        return []

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        label_features = self.decoder(features, rngs=rngs)
        return Prediction(self.with_linear_path(self.classifier(partition.shard_labels(label_features)), features))

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return {`labels`: f32[B,K,N]}, the attention over patches of the queries, which labels may share."""
        weights = self.decoder.attention(features)
        if self.by_label:
            return {LABELS: weights}
        return {LABELS: jnp.repeat(weights, self.classifier.kernel.shape[-1], axis=1)[:, : self.labels]}
