"""Query decoders as classifiers: Q2L, and ML-Decoder with full and with grouped decoding, are settings of one head."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import LABELS, Features, Prediction
from mlmoe_jax.models.layers.initializers import torch_linear
from mlmoe_jax.models.query_decoder import QueryDecoder

CLASSIFIERS = ("per_label", "grouped")
# To stand before the trainable rules where queries are fixed: they are counted, and nothing may move them.
FIXED_QUERIES = (r"^head/decoder/queries$", False)

# What Query2Label (Liu et al., 2021) sets, as its code for ResNet-101 does; its width is that of the backbone.
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


class QueryHead(nnx.Module):
    """A query decoder over the image's tokens, and a linear classifier on what its queries found.

    classifier: `per_label` gives every label a query of its own, `grouped` lets ⌈K/Q⌉ labels share one; they also
    differ in their initial values (see GroupedClassifier). Raises UserError where numbers of queries and labels do not
    fit together.
    """

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
        self.by_label = queries == labels  # labels may lie over the mesh, see models.partition
        init = "uniform" if classifier == "per_label" else "xavier"
        self.classifier = GroupedClassifier(decoder.width, queries, labels, init=init, rngs=rngs)

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
        """Return the multiply-adds an image with N = `tokens` patches: of layers, and what attention products add."""
        layers, products = self.decoder.published_macs(tokens)
        return layers + self.classifier.kernel.size, products


def q2l_head(
    channels: int, labels: int, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs, **changes: Any
) -> QueryHead:
    """Return the head of Q2L for a backbone of C = `channels` and K = `labels`.

    changes: arguments of QueryDecoder that replace those of `Q2L`. The width is C, without a projection, as the authors
    train it; another `width` gets the linear projection that their code calls the input projection.
    """
    settings = {"width": channels, **Q2L, **changes}
    settings.setdefault("project", "none" if settings["width"] == channels else "linear")
    decoder = QueryDecoder(channels, labels, dtype=dtype, rngs=rngs, **settings)
    return QueryHead(decoder, labels, classifier="per_label", rngs=rngs)


def ml_decoder_head(
    channels: int,
    labels: int,
    *,
    groups: int = 100,
    dtype: jnp.dtype | None = None,
    rngs: nnx.Rngs,
    **changes: Any,
) -> QueryHead:
    """Return the head of ML-Decoder for a backbone of C = `channels` and K = `labels`.

    groups: at most this many queries; from K on, every label has its own (full decoding), below it they share
    (grouped decoding). The queries are fixed: put FIXED_QUERIES before the trainable rules. changes: arguments of
    QueryDecoder that replace those of `ML_DECODER`.
    """
    queries = min(groups, labels)
    decoder = QueryDecoder(channels, queries, dtype=dtype, rngs=rngs, **{**ML_DECODER, **changes})
    return QueryHead(decoder, labels, classifier="grouped", rngs=rngs)
