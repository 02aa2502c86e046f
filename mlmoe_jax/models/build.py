"""Build a model from a config."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.adapters.catalog import described, prompts_of
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.contracts import PROMPTS, Adapter, Backbone, BackboneShape, Features, Head, Prediction
from mlmoe_jax.models.heads.catalog import head_of
from mlmoe_jax.runtime.setup import dtypes


class Classifier(nnx.Module):
    """A backbone, prompts if any, and a head."""

    def __init__(self, backbone: Backbone, prompts: Adapter | None, head: Head, *, final_norm: bool):
        self.backbone, self.prompts, self.head, self.final_norm = backbone, prompts, head, final_norm

    def __call__(
        self,
        image: jax.Array,
        *,
        labels: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Prediction:
        """Classify f32[B,H,W,3]. labels f32[B,K] and rngs are for models whose training needs them.

        return_attention: also return `attention` and `grid` (see Prediction); only for evaluation, without dropout.
        """
        features = self.encode(image, rngs=rngs, return_attention=return_attention)
        return self.classify(features, labels=labels, rngs=rngs, return_attention=return_attention)

    def encode(self, image: jax.Array, *, rngs: nnx.Rngs | None = None, return_attention: bool = False) -> Features:
        """Return the features of f32[B,H,W,3] that the head reads."""
        prompts = None if self.prompts is None else self.prompts(image.shape[0], rngs=rngs)
        return self.backbone(
            image, prompts, read=self.head.read, norm=self.final_norm, return_attention=return_attention
        )

    def classify(
        self,
        features: Features,
        *,
        labels: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Prediction:
        """Classify features that `encode` has returned."""
        with partition.crossing(self.head):
            prediction = self.head(features, labels=labels, rngs=rngs)
            sharded = jax.tree.map(partition.by_label, (prediction.logits, prediction.terms, prediction.gates))
            prediction = replace(prediction, **dict(zip(("logits", "terms", "gates"), sharded, strict=True)))
            if not return_attention:
                return prediction
            of_labels = self.head.attention(features)
        return replace(prediction, attention={**features.attention, **of_labels}, grid=features.grid)


def build_prompts(config: ConfigDict, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs) -> Adapter | None:
    """Return the prompts that `config.model.prompts` describes, or None.

    Raises UserError if the backbone is not a ViT.
    """
    shape = backbone_shape(config)
    if (adapters := described(config)) and not shape.takes_adapters:
        raise UserError(f"the backbone of {adapters} must be a ViT, and {config.model.backbone.name} is not one")
    return prompts_of(config).from_config(config.model.prompts, shape, dtype=dtype, rngs=rngs)


def backbone_shape(config: ConfigDict) -> BackboneShape:
    """Return the architecture that `config.model.backbone.name` names."""
    return catalog.entry(config.model.backbone.name).shape


def reads_final_norm(settings: ConfigDict, *, prompts: bool) -> bool:
    """Return whether the head reads features after the final norm of the backbone.

    settings: `config.model.backbone`. prompts: whether the head reads prompts. ML-VPT's code reads the prompts of some
    backbones before the final norm; VPT's code reads the class token after it for all backbones.
    """
    chosen = {"yes": True, "no": False}
    return chosen.get(settings.final_norm, not prompts or catalog.entry(settings.name).final_norm)


def build_model(config: ConfigDict, label_space: LabelSpace, *, rngs: nnx.Rngs) -> Classifier:
    """Build the model of a config for K = len(label_space.names) labels, with random weights.

    Raises UserError for adapters of a backbone that is not a ViT.
    """
    settings = config.model
    products, _ = dtypes(config)
    dtype = None if products == "float32" else jnp.dtype(products)
    shape = backbone_shape(config)
    prompts = build_prompts(config, dtype=dtype, rngs=rngs)
    backbone = shape.build(dtype=dtype, remat=settings.remat, batch_norm=settings.backbone.batch_norm, rngs=rngs)
    head = head_of(config).from_config(config, shape.width, label_space, dtype=dtype, rngs=rngs)
    return Classifier(
        backbone, prompts, head, final_norm=reads_final_norm(settings.backbone, prompts=PROMPTS in head.read)
    )
