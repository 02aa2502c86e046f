"""Linear classifiers on the class token, on the patch tokens, on both, on a mean of tokens, and on label features."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float
from ml_collections import ConfigDict

from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.layers.initializers import Dtype, torch_linear, torch_uniform
from mlmoe_jax.models.outputs import CLS, MEAN, PATCHES, Features, Prediction
from mlmoe_jax.models.partition import LABEL, axes

POOLS = {"cls": (CLS,), "patches": (PATCHES,), "both": (CLS, PATCHES), "mean": (MEAN,), "max": (PATCHES,)}


def label_linear(width: int, labels: int, **settings: Any) -> nnx.Linear:
    """Return a linear layer with one output per label; `settings` are arguments of `torch_linear`."""
    metadata = {"kernel_metadata": axes(None, LABEL), "bias_metadata": axes(LABEL)}
    return torch_linear(width, labels, **metadata, **settings)


class LinearHead(Head):
    """A linear classifier, logits = V·x + b, with the initial values of torch.nn.Linear.

    x is a feature of the image, V f32[D,K] are the weights, and b f32[K] is the bias.

    Args:
      pool: `cls` (linear probing, VPT, full fine-tuning) classifies the class token. `mean` classifies the mean over
        prompts and patches, as the code of VPT, GateVPT and E2VPT does on MAE. `patches` classifies every patch token
        and takes the log-mean-exp of the logits over patches. It is a smooth maximum, so a high logit at one patch is
        sufficient (Pinheiro and Collobert, CVPR 2015, with r = 1). `both` has both classifiers and reports the mean of
        their logits; `Prediction.terms` has the logits `cls` and `patches`. `max` classifies the largest value of each
        channel over the patches, as SpliceMix does.
    """

    by_label = True

    def __init__(self, width: int, labels: int, *, pool: str = "cls", rngs: nnx.Rngs):
        self.pool = pool
        self.read = POOLS[pool]
        if pool != "patches":
            self.classifier = label_linear(width, labels, rngs=rngs)
        if pool in ("patches", "both"):
            self.patch_classifier = label_linear(width, labels, rngs=rngs)

    @classmethod
    def options(cls, head: ConfigDict, dtype: Dtype) -> dict[str, Any]:
        return {"pool": head.pool}

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        pool = config.model.head.pool
        return ("logits", *(() if pool in ("mean", "max") else POOLS.get(pool, ())))

    def image_vectors(self, features: Features) -> Float[Array, "b d"]:
        """Return the feature of each image that `classifier` classifies."""
        if self.pool == "max":
            pooled = features.patches.max(axis=1)
        else:
            pooled = features.mean if self.pool == "mean" else features.cls
        return jnp.asarray(partition.shard_images(pooled), jnp.float32)

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        if self.pool in ("mean", "max"):
            return Prediction(self.classifier(self.image_vectors(features)))
        terms = {}
        if CLS in self.read:
            terms[CLS] = self.classifier(self.image_vectors(features))
        if PATCHES in self.read:
            votes = self.patch_classifier(partition.shard_images(features.patches).astype(jnp.float32))
            terms[PATCHES] = jax.nn.logsumexp(votes, axis=1) - math.log(votes.shape[1])
        return Prediction(sum(terms.values()) / len(terms), terms)


class LabelClassifier(nnx.Module):
    """A classifier for one feature per label: the logit of label k is ⟨v_k, o_k⟩ + b_k.

    o_k is the feature of label k. v_k and b_k are its weight vector and bias. With `share="shared"`, all labels share
    one weight vector and one bias (DR-MoE, eq. 9 as printed).
    """

    def __init__(self, width: int, labels: int, *, share: str = "per_label", rngs: nnx.Rngs):
        rows, owner = (labels, LABEL) if share == "per_label" else (1, None)
        self.per_label = share == "per_label"
        self.macs = labels * width  # multiply-adds per image
        draw = torch_uniform(width)
        self.kernel = nnx.Param(draw(rngs.params(), (rows, width)), **axes(owner, None))
        self.bias = nnx.Param(draw(rngs.params(), (rows,)), **axes(owner))

    def __call__(self, features: Float[ArrayLike, "b k o"]) -> Float[Array, "b k"]:
        kernel = self.kernel[...]
        votes = jnp.einsum("bko,ko->bk", features, kernel) if self.per_label else features @ kernel[0]
        return votes + self.bias[...]
