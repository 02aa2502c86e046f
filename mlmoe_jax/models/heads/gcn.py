"""Heads that pass information between labels along a graph: a fixed graph in ML-GCN, one graph per image in ADD-GCN."""

from __future__ import annotations

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.graph import label_graph
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.heads.linear import LabelClassifier, label_linear
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.layers.initializers import Constant, Dtype, torch_linear, uniform
from mlmoe_jax.models.outputs import LABELS, PATCHES, Features, Prediction
from mlmoe_jax.models.partition import LABEL, WORD_VECTOR, axes

SLOPE = 0.2  # of LeakyReLU below 0, in both papers' code


def _leaky(x: jax.Array) -> jax.Array:
    return jax.nn.leaky_relu(x, SLOPE)


class MLGCNHead(Head):
    """ML-GCN: a graph network computes the classifiers from the word vectors of the labels (Chen et al., CVPR 2019).

    X are the word vectors of the labels, and Ā is the normalized adjacency matrix of the label graph. Two graph layers
    compute H₁ = LeakyReLU(Ā X W₁) and H₂ = Ā H₁ W₂ (ML-GCN, eq. 2). Row k of H₂ f32[K,D] is the weight vector of the
    classifier of label k. The logits are f·H₂ᵀ, where f is the maximum over all cells of the feature map (ML-GCN, eq.
    3–4). There are no biases.

    The only learned parameters are W₁ (`gc1/kernel`) and W₂ (`gc2/kernel`). Their initial values are drawn from
    U(±1/√columns), as in the authors' code.

    Args:
      word_vectors: X f32[K,d].
      adjacency: Ā f32[K,K], see `data.labels.graph.label_graph`.
    """

    read = (PATCHES,)
    by_label = False  # labels interact, so they are replicated
    needs_vectors = True

    def __init__(
        self,
        width: int,
        word_vectors: Constant,
        adjacency: Constant,
        *,
        hidden: int = 1024,
        dtype: Dtype = None,
        rngs: nnx.Rngs,
    ):
        inputs = word_vectors.value.shape[1]
        self.word_vectors = word_vectors
        self.adjacency = adjacency

        def layer(rows: int, columns: int) -> nnx.Linear:
            settings = {"use_bias": False, "kernel_metadata": axes(WORD_VECTOR, None), "dtype": dtype, "rngs": rngs}
            return nnx.Linear(rows, columns, kernel_init=uniform(1 / math.sqrt(columns)), **settings)

        self.gc1 = layer(inputs, hidden)
        self.gc2 = layer(hidden, width)

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        graph = config.model.head.graph
        adjacency = label_graph(space.counts, space.positives)
        vectors = space.vectors
        if vectors is None:  # for synthetic labels
            vectors = np.zeros((len(space.names), graph.vector_width), np.float32)
        return cls(width, Constant(vectors), Constant(adjacency), hidden=graph.hidden, dtype=dtype, rngs=rngs)

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        if config.model.head.names and config.model.head.graph.word_vectors:
            return ["model.head.names and model.head.graph.word_vectors both name vectors of the labels: leave one out"]
        return []

    def classifiers(self) -> Float[Array, "k d"]:
        """Return the weight vectors of the classifiers, H₂ in the class docstring. They do not depend on the image."""
        nodes = _leaky(self._spread(self.gc1(self.word_vectors.value)))
        return self._spread(self.gc2(nodes))

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        feature = features.patches.max(axis=1).astype(jnp.float32)
        return Prediction(feature @ self.classifiers().T)

    def published_macs(self, tokens: int, counted: int) -> tuple[int, int]:
        """Return multiply-adds: (classifiers, graph layers). Graph layers run once per batch, but count per image."""
        classifiers = len(self.word_vectors.value) * self.gc2.out_features
        return classifiers, counted - classifiers

    def _spread(self, nodes: jax.Array) -> jax.Array:
        return self.adjacency.value @ nodes.astype(jnp.float32)


class DynamicGraph(nnx.Module):
    """Two graph layers on label features (ADD-GCN, sec. 3.3).

    The first layer has a static graph, which is learned and equal for all images. The second layer has a dynamic graph,
    which is computed per image. In training, batch normalization uses the statistics of the batch of images.
    """

    def __init__(self, width: int, labels: int, *, dtype: Dtype = None, rngs: nnx.Rngs):
        options = {"dtype": dtype, "rngs": rngs}
        graph = {"use_bias": False, "kernel_metadata": axes(LABEL, LABEL)}
        self.static_graph = torch_linear(labels, labels, **graph, **options)
        self.static = torch_linear(width, width, **options)
        self.context = torch_linear(width, width, **options)
        self.context_norm = BatchNorm(width, mode="trainable")
        self.relation = label_linear(2 * width, labels, **options)
        self.dynamic = torch_linear(width, width, **options)

    def spread_static(self, features: Float[ArrayLike, "b k d"]) -> Float[Array, "b k d"]:
        """Return V + LeakyReLU(LeakyReLU(A_s V) W_s + b) for label features V, and the static graph A_s [K,K]."""
        mixed = jnp.swapaxes(self.static_graph(jnp.swapaxes(features, 1, 2)), 1, 2)
        return features + _leaky(self.static(_leaky(mixed)))

    def adjacency(self, features: Float[ArrayLike, "b k d"]) -> Float[Array, "b k k"]:
        """Return the dynamic graph of each image, with entries in 0…1.

        Entry (i, j) is the weight of label j for label i, σ(w_j·[g; h_i] + b_j), with learned w_j and b_j. h_i is the
        feature of label i. g is the mean feature of all labels, after a linear layer, batch normalization and
        LeakyReLU.
        """
        context = self.context(features.mean(axis=1))
        context = _leaky(self.context_norm(context[:, None, None])[:, 0])
        pairs = jnp.concatenate([jnp.broadcast_to(context, features.shape), features], axis=-1)
        return jax.nn.sigmoid(self.relation(pairs).astype(jnp.float32))

    def __call__(self, features: Float[ArrayLike, "b k d"]) -> Float[Array, "b k d"]:
        """Return LeakyReLU(LeakyReLU(A_d H) W_d + b) for H of `spread_static` and its `adjacency` A_d."""
        features = self.spread_static(features)
        mixed = jnp.einsum("bij,bjd->bid", self.adjacency(features), features)
        return _leaky(self.dynamic(_leaky(mixed))).astype(jnp.float32)


class ADDGCNHead(Head):
    """ADD-GCN: label features by attention over the map, and a graph per image (Ye et al., ECCV 2020).

    A linear layer without bias computes a score per label and cell of the feature map. The logit s_m of a label is its
    largest score over the cells. The feature of a label is a weighted sum of the transformed cells. The weights are the
    sigmoids of the scores, not normalized over cells (ADD-GCN, sec. 3.2). DynamicGraph maps these label features V to
    new label features, which are added to V. One classifier per label computes the logit s_r from the sum. The reported
    logits are (s_m + s_r)/2, in training and evaluation (ADD-GCN, sec. 3.4).

    The classifier of a label is applied only to the feature of this label. The authors' code applies all K classifiers
    to all features and multiplies by an identity matrix, stored as `mask_mat` in the authors' weight files.

    `Prediction.terms` has the keys `map` (s_m) and `graph` (s_r).
    """

    read = (PATCHES,)
    by_label = False  # labels interact, so they are replicated
    batch_statistics = True

    def __init__(self, width: int, labels: int, *, hidden: int = 1024, dtype: Dtype = None, rngs: nnx.Rngs):
        self.map_classifier = label_linear(width, labels, use_bias=False, dtype=dtype, rngs=rngs)
        self.transform = torch_linear(width, hidden, dtype=dtype, rngs=rngs)
        self.graph = DynamicGraph(hidden, labels, dtype=dtype, rngs=rngs)
        self.classifier = LabelClassifier(hidden, labels, rngs=rngs)

    @classmethod
    def options(cls, head: ConfigDict, dtype: Dtype) -> dict[str, Any]:
        return {"hidden": head.graph.hidden, "dtype": dtype}

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        return ("logits", "map", "graph")

    def label_features(
        self, patches: Float[ArrayLike, "b n d"], scores: Float[ArrayLike, "b n k"]
    ) -> Float[Array, "b k hidden"]:
        """Return the label features: sums over the transformed cells, weighted by σ(scores) of each label."""
        cells = self.transform(patches)
        weights = jax.nn.sigmoid(scores).astype(cells.dtype)
        return jnp.einsum("bnk,bnd->bkd", weights, cells, preferred_element_type=jnp.float32)

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return {`labels`: f32[B,K,N]}, σ(score) of each cell and label, divided by the sum over all cells."""
        scores = self.map_classifier(features.patches).astype(jnp.float32)
        # A softmax of log σ is finite even if every σ rounds to 0.
        return {LABELS: jnp.swapaxes(jax.nn.softmax(jax.nn.log_sigmoid(scores), axis=1), 1, 2)}

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        scores = self.map_classifier(features.patches).astype(jnp.float32)
        label_features = self.label_features(features.patches, scores)
        related = label_features + self.graph(label_features)
        terms = {"map": scores.max(axis=1), "graph": self.classifier(related)}
        return Prediction((terms["map"] + terms["graph"]) / 2, terms)

    def published_macs(self, tokens: int, counted: int) -> tuple[int, int]:
        """Return multiply-adds: (layers, with K classifiers on K features as in the authors' code; other matmuls)."""
        (width, labels), hidden = self.map_classifier.kernel.shape, self.transform.out_features
        on_map = tokens * width * (labels + hidden)
        on_labels = labels * hidden * (4 * labels + 2 * hidden) + hidden**2
        return on_map + on_labels, tokens * labels * hidden + labels**2 * hidden
