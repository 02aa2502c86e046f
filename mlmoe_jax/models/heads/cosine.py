"""A linear classifier of normalized image vectors, which vectors of label names can give its weights."""

from __future__ import annotations

from typing import Self

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import Initializer
from jax import Array
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.name_vectors import NameVectors
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.heads.linear import label_linear
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.outputs import CLS, Features, Prediction


class CosineHead(Head):
    """A linear classifier of the normalized feature of the image, logits = V·u + b.

    u = v/‖v‖, where v is the feature `cls`, or its product with a frozen projection. V f32[D,K] are the weights, and b
    f32[K] is the bias. With `vectors`, the vectors t of the label names, the initial weights are scale·(t − t_0), the
    initial scores are the scores of the image-text model, and the projection is `vectors.projection`; see
    `NameVectors`. If `vectors` is None, there is no projection, and initial values are drawn as in torch.nn.Linear.
    """

    read = (CLS,)
    by_label = True
    starts_from_names = True

    def __init__(self, width: int, labels: int, vectors: NameVectors | None = None, *, rngs: nnx.Rngs):
        projection, initial, inputs = None, {}, width
        if vectors is not None:
            initial = {"kernel_init": _fixed(vectors.kernel()), "bias_init": _fixed(vectors.offsets())}
            inputs = vectors.vectors.shape[1]
            if vectors.projection is not None:
                settings = {"use_bias": False, "kernel_init": _fixed(vectors.projection), "rngs": rngs}
                projection = nnx.Linear(*vectors.projection.shape, **settings)
        self.projection = projection
        self.classifier = label_linear(inputs, labels, **initial, rngs=rngs)

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        vectors, model = space.name_vectors, config.model
        if vectors is not None and vectors.inputs != width:
            raise UserError(
                f"{model.head.names} has vectors for features of {vectors.inputs:,} numbers, as {vectors.backbone} has "
                f"them, and {model.backbone.name} has {width:,}; encode the names again"
            )
        return cls(width, len(space.names), vectors, rngs=rngs)

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        return (("^head/projection/", False),)

    def image_vectors(self, features: Features) -> Array:
        """Return the normalized vectors f32[B,D] of images."""
        vectors = features.cls.astype(jnp.float32)
        if self.projection is not None:
            vectors = self.projection(vectors)
        return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        return Prediction(self.classifier(partition.shard_images(self.image_vectors(features))))


def _fixed(values: np.ndarray) -> Initializer:
    """Return an initializer that returns `values`."""
    return lambda key, shape, dtype=None, **_: jnp.asarray(values, dtype).reshape(shape)
