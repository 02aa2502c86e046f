"""Query decoders as classifiers: Q2L, and ML-Decoder with full and with grouped decoding, are settings of one head."""

from __future__ import annotations

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import LABELS, Features, Head, LabelRows, Prediction
from mlmoe_jax.models.layers.initializers import torch_linear
from mlmoe_jax.models.query_decoder import QueryDecoder, decoder_settings, fixed_queries

CLASSIFIERS = ("per_label", "grouped")

# What Query2Label (Liu et al., 2021) sets of `config.model.head.decoder`, as its code for ResNet-101 does; its width is
# that of the backbone.
Q2L: dict[str, Any] = {
    "heads": 4,
    "hidden": 8192,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "self_attention": "none",
    "query_role": "added",
    "positions": "detr",
    "init": "xavier",
}
# What ML-Decoder (Ridnik et al., WACV 2023) sets.
ML_DECODER: dict[str, Any] = {
    "width": 768,
    "heads": 8,
    "hidden": 2048,
    "encoder_layers": 0,
    "decoder_layers": 1,
    "self_attention": "identity",
    "query_role": "input",
    "fixed_queries": True,
    "positions": "none",
    "decoder_norm": False,
    "project": "linear_relu",
    "init": "torch",
}


class GroupedClassifier(nnx.Module):
    """Query q gives the logits of F = ⌈K/Q⌉ labels, w[q,:,f]·h[q]; those of all queries in a row, cut to K, plus b.

    With Q = K it is the group-wise linear layer of Query2Label (Liu et al., 2021), a weight vector and a bias for every
    label; with Q < K the group fully-connected layer of ML-Decoder (Ridnik et al., WACV 2023).
    init: `uniform`, U(±1/√D) for weights and biases (Q2L); `xavier`, normal weights as torch's xavier_normal gives them
    to a tensor of this shape, and biases 0 (ML-Decoder).
    """

    def __init__(self, width: int, queries: int, labels: int, *, init: str = "uniform", rngs: nnx.Rngs):
        each = math.ceil(labels / queries)
        if init == "uniform":
            draw, bias = torch_linear(width), torch_linear(width)
        else:
            # torch counts the middle axis as inputs and the first as outputs, both times the last
            draw = nnx.initializers.normal(math.sqrt(2 / ((width + queries) * each)))
            bias = nnx.initializers.zeros
        self.kernel = nnx.Param(draw(rngs.params(), (queries, width, each)))
        self.bias = nnx.Param(bias(rngs.params(), (labels,)))

    def __call__(self, features: jax.Array) -> jax.Array:
        """f32[B,Q,D] -> logits f32[B,K]."""
        votes = jnp.einsum("bqd,qdf->bqf", features, self.kernel[...])
        return votes.reshape(votes.shape[0], -1)[:, : self.bias.size] + self.bias[...]


class QueryHead(Head):
    """A query decoder over the image's tokens, and a linear classifier on what its queries found.

    classifier: `per_label` gives every label a query of its own, `grouped` lets ⌈K/Q⌉ labels share one; they also
    differ in their initial values (see GroupedClassifier). Raises UserError where numbers of queries and labels do not
    fit together.
    """

    label_rows = (LabelRows(r"^head/decoder/queries$"), LabelRows(r"^head/classifier/(kernel|bias)$"))

    def __init__(self, decoder: QueryDecoder, labels: int, *, classifier: str = "per_label", rngs: nnx.Rngs):
        if classifier not in CLASSIFIERS:
            raise ValueError(f"a classifier is one of {', '.join(CLASSIFIERS)}, not {classifier!r}")
        queries = decoder.num_queries
        if classifier == "per_label" and queries != labels:
            raise UserError(
                f"a classifier a label needs a query a label, and there are {queries} queries for {labels} labels: "
                "use as many queries or the grouped classifier"
            )
        if queries > labels:
            raise UserError(f"{queries} groups of queries are more than {labels} labels: choose at most one a label")
        self.decoder, self.read = decoder, decoder.read
        self.by_label = queries == labels
        init = "uniform" if classifier == "per_label" else "xavier"
        self.classifier = GroupedClassifier(decoder.width, queries, labels, init=init, rngs=rngs)

    @classmethod
    def from_config(
        cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> Self:
        """Build the head of `config.model.head.decoder`, with at most as many queries as labels."""
        settings, labels = config.model.head.decoder, len(space.names)
        queries = min(settings.queries or labels, labels)
        decoder = QueryDecoder(width, queries, **decoder_settings(settings, width), dtype=dtype, rngs=rngs)
        # the initial values of Q2L's classifier, or those of ML-Decoder's, whose queries are fixed
        classifier = "grouped" if settings.fixed_queries or queries < labels else "per_label"
        return cls(decoder, labels, classifier=classifier, rngs=rngs)

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        """Return the rule that freezes fixed queries."""
        return fixed_queries(config.model.head.decoder)

    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        """Classify `features.patches` f32[B,N,C] into K labels; `rngs` is for dropout in training, labels unread."""
        queried = self.decoder(features, rngs=rngs)
        return Prediction(self.classifier(partition.by_label(queried)))

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return where each label's query looks, `labels` f32[B,K,N]; labels that share a query have the same map."""
        weights = self.decoder.attention(features)
        labels, each = self.classifier.bias.size, self.classifier.kernel.shape[-1]
        return {LABELS: weights if each == 1 else jnp.repeat(weights, each, axis=1)[:, :labels]}

    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return the multiply-adds per image with N = `tokens` patches: of layers, and what attention products add."""
        layers, products = self.decoder.published_macs(tokens)
        return layers + self.classifier.kernel.size, products
