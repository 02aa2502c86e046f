"""Heads that pass information between labels along a graph: ML-GCN's fixed one, ADD-GCN's one per image."""

from __future__ import annotations

import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.graph import label_graph
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models.contracts import LABELS, PATCHES, Features, Head, LabelRows, Prediction
from mlmoe_jax.models.heads.group_experts import LabelClassifier
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.models.layers.initializers import torch_linear, uniform

SLOPE = 0.2  # of LeakyReLU below 0, in both papers' code


def _leaky(x: jax.Array) -> jax.Array:
    return jax.nn.leaky_relu(x, SLOPE)


class MLGCNHead(Head):
    """ML-GCN: a graph network makes the classifiers out of the labels' word vectors (Chen et al., CVPR 2019).

    H₁ = LeakyReLU(Ā X W₁), H₂ = Ā H₁ W₂ (eq. 2, twice), and logits = f·H₂ᵀ for the maximum f over all places of the map
    (eq. 3–4); there is no bias. Only W₁ and W₂ are learned, `gc1/kernel` and `gc2/kernel`, drawn from U(±1/√columns) as
    in the authors' code.

    word_vectors: X f32[K,d]. adjacency: Ā f32[K,K], see `data.labels.graph.label_graph`.
    """

    read = (PATCHES,)
    by_label = False  # labels interact, so they are replicated
    vector_rows = r"^head/gc\d/"  # no row of them is a label's: its classifiers are made out of word vectors
    needs_vectors = True

    def __init__(
        self,
        width: int,
        word_vectors: Constant,
        adjacency: Constant,
        *,
        hidden: int = 1024,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        labels, inputs = word_vectors.value.shape
        if adjacency.value.shape != (labels, labels):
            raise ValueError(f"{labels} word vectors need an adjacency of that size, not {adjacency.value.shape}")
        self.word_vectors, self.adjacency = word_vectors, adjacency

        def layer(into: int, out: int) -> nnx.Linear:
            draw = uniform(1 / math.sqrt(out))
            return nnx.Linear(into, out, use_bias=False, kernel_init=draw, dtype=dtype, rngs=rngs)

        self.gc1, self.gc2 = layer(inputs, hidden), layer(hidden, width)

    @classmethod
    def from_config(
        cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> Self:
        """Build the head on the labels' word vectors and the graph of their training counts."""
        graph = config.model.head.graph
        adjacency = label_graph(
            space.counts, space.positives, threshold=graph.threshold, share=graph.share, transpose=graph.transpose
        )
        vectors = space.vectors
        if vectors is None:  # made-up labels, for which counts and vectors do not matter
            vectors = np.zeros((len(space.names), graph.vector_width), np.float32)
        return cls(width, Constant(vectors), Constant(adjacency), hidden=graph.hidden, dtype=dtype, rngs=rngs)

    def classifiers(self) -> jax.Array:
        """Return H₂ f32[K,D], a row for every label; it does not depend on the image."""
        nodes = _leaky(self._spread(self.gc1(self.word_vectors.value)))
        return self._spread(self.gc2(nodes))

    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        """Classify `features.patches` f32[B,N,D] into K labels."""
        feature = features.patches.max(axis=1).astype(jnp.float32)
        return Prediction(feature @ self.classifiers().T)

    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return K·D of the classifiers, and the graph layers as for one image alone; a batch has them only once."""
        (labels, inputs), (hidden, width) = self.word_vectors.value.shape, self.gc2.kernel.shape
        layers = labels * (inputs * hidden + hidden * width)
        return labels * width, layers + labels**2 * (hidden + width)

    def _spread(self, nodes: jax.Array) -> jax.Array:
        return self.adjacency.value @ nodes.astype(jnp.float32)


def _pointwise(into: int, out: int, *, bias: bool = True, dtype: jnp.dtype | None, rngs: nnx.Rngs) -> nnx.Linear:
    """A convolution of size 1, drawn as PyTorch draws it."""
    draw = torch_linear(into)
    return nnx.Linear(into, out, use_bias=bias, kernel_init=draw, bias_init=draw, dtype=dtype, rngs=rngs)


class DynamicGraph(nnx.Module):
    """Two graph layers on label features: one graph for all images, then one of each image's own (ADD-GCN, sec. 3.3).

    The batch normalisation is one over images; its statistics are those of the batch in training.
    """

    def __init__(self, width: int, labels: int, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        self.static_graph = _pointwise(labels, labels, bias=False, dtype=dtype, rngs=rngs)
        self.static = _pointwise(width, width, dtype=dtype, rngs=rngs)
        self.context = _pointwise(width, width, dtype=dtype, rngs=rngs)
        self.context_norm = BatchNorm(width, mode="trainable")
        self.relation = _pointwise(2 * width, labels, dtype=dtype, rngs=rngs)
        self.dynamic = _pointwise(width, width, dtype=dtype, rngs=rngs)

    def spread_static(self, features: jax.Array) -> jax.Array:
        """Return V + LeakyReLU(LeakyReLU(A_s V) W_s + b) of label features V f32[B,K,D]: f32[B,K,D]."""
        mixed = jnp.swapaxes(self.static_graph(jnp.swapaxes(features, 1, 2)), 1, 2)
        return features + _leaky(self.static(_leaky(mixed)))

    def adjacency(self, features: jax.Array) -> jax.Array:
        """Return the graph that an image's label features f32[B,K,D] make: f32[B,K,K] in 0…1.

        Entry (i, j) is how much label i takes from label j: σ(w_j·[g; h_i] + b_j), where g is the mean label feature
        after a linear layer, batch normalisation and LeakyReLU.
        """
        context = self.context(features.mean(axis=1))
        context = _leaky(self.context_norm(context[:, None, None])[:, 0])
        pairs = jnp.concatenate([jnp.broadcast_to(context, features.shape), features], axis=-1)
        return jax.nn.sigmoid(self.relation(pairs).astype(jnp.float32))

    def __call__(self, features: jax.Array) -> jax.Array:
        """Return LeakyReLU(LeakyReLU(A_d H) W_d + b), H from `spread_static` and A_d from `adjacency`: f32[B,K,D]."""
        features = self.spread_static(features)
        mixed = jnp.einsum("bij,bjd->bid", self.adjacency(features), features)
        return _leaky(self.dynamic(_leaky(mixed))).astype(jnp.float32)


class ADDGCNHead(Head):
    """ADD-GCN: label features by attention over the map, related by a graph of each image's own (Ye et al., ECCV 2020).

    A linear layer without bias scores every label at every place. The largest score of a label is its logit s_m; their
    sigmoid, which is not normalised over places, weighs the places in the label's feature V (sec. 3.2). The graph
    network's output is added to V and classified label by label into s_r. Reported is (s_m + s_r)/2, in training and
    afterwards (sec. 3.4).

    A label's classifier sees the label's own feature only. The authors' code applies all K classifiers to all features
    and multiplies by an identity matrix, which their files keep as `mask_mat`.

    terms: `map` is s_m, `graph` is s_r.
    """

    read = (PATCHES,)
    by_label = False  # labels interact, so they are replicated
    label_rows = (
        LabelRows(r"^head/map_classifier/kernel$", (1,)),
        LabelRows(r"^head/graph/static_graph/kernel$", (0, 1)),
        LabelRows(r"^head/graph/relation/kernel$", (1,)),
        LabelRows(r"^head/graph/relation/bias$"),
        LabelRows(r"^head/classifier/(kernel|bias)$"),
    )

    def __init__(self, width: int, labels: int, *, hidden: int = 1024, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        self.map_classifier = _pointwise(width, labels, bias=False, dtype=dtype, rngs=rngs)
        self.transform = _pointwise(width, hidden, dtype=dtype, rngs=rngs)
        self.graph = DynamicGraph(hidden, labels, dtype=dtype, rngs=rngs)
        self.classifier = LabelClassifier(hidden, labels, rngs=rngs)

    @classmethod
    def from_config(
        cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> Self:
        """Build the head of `config.model.head.graph.hidden`."""
        return cls(width, len(space.names), hidden=config.model.head.graph.hidden, dtype=dtype, rngs=rngs)

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        """Return `logits`, `map` and `graph`."""
        return ("logits", "map", "graph")

    def label_features(self, patches: jax.Array, scores: jax.Array) -> jax.Array:
        """Sum the places of a map f32[B,N,D], transformed and weighted by σ(scores f32[B,N,K]): f32[B,K,hidden]."""
        places = self.transform(patches)
        weights = jax.nn.sigmoid(scores).astype(places.dtype)
        return jnp.einsum("bnk,bnd->bkd", weights, places, preferred_element_type=jnp.float32)

    def dynamic_graph(self, features: Features) -> jax.Array:
        """Return the graph of each image, f32[B,K,K]; see `DynamicGraph.adjacency`."""
        scores = self.map_classifier(features.patches).astype(jnp.float32)
        label_features = self.label_features(features.patches, scores)
        return self.graph.adjacency(self.graph.spread_static(label_features))

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return each place's share of a label's feature, σ(score) over its sum: `labels` f32[B,K,N]."""
        scores = self.map_classifier(features.patches).astype(jnp.float32)
        # the softmax of log σ, which is finite where every σ rounds to 0
        return {LABELS: jnp.swapaxes(jax.nn.softmax(jax.nn.log_sigmoid(scores), axis=1), 1, 2)}

    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        """Classify `features.patches` f32[B,N,D] into K labels."""
        scores = self.map_classifier(features.patches).astype(jnp.float32)
        label_features = self.label_features(features.patches, scores)
        related = label_features + self.graph(label_features)
        votes = jnp.einsum("bkd,kd->bk", related, self.classifier.kernel[...]) + self.classifier.bias[...]
        terms = {"map": scores.max(axis=1), "graph": votes}
        return Prediction((terms["map"] + terms["graph"]) / 2, terms)

    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return the convolutions as the authors' code has them, all K classifiers on all K features among them, and
        what the attention over the map and the products with the dynamic graph add.
        """
        (width, labels), hidden = self.map_classifier.kernel.shape, self.transform.out_features
        on_map = tokens * width * (labels + hidden)
        on_labels = labels * hidden * (4 * labels + 2 * hidden) + hidden**2
        return on_map + on_labels, tokens * labels * hidden + labels**2 * hidden
