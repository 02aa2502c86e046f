"""Patching-based classification: an image and its four quarters (PAT)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from ml_collections import ConfigDict

from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.heads.linear import label_linear
from mlmoe_jax.models.outputs import CLS, QUARTERS, Features, Prediction


class PatchingHead(Head):
    """The logits are the mean of c(x) and Σ_j a_j v(x_j), with a = softmax over j of u(x_j), for each label (PAT).

    x is the feature of the image, and x_j is the feature of its quarter j. c, u and v are linear classifiers. A quarter
    with the object of a label has no context, so a label that is only likely from other objects is not confirmed by it.

    The paper calls this the total direct effect of an object. The formula follows the authors' code, with three
    classifiers (`logits_attention=cross`) on two by two quarters. Their code augments each quarter separately. Here,
    the image is augmented and then divided into quarters. `Prediction.terms` has the logits `cls` and `quarters`, for a
    loss each.
    """

    read = (CLS, QUARTERS)
    by_label = True

    def __init__(self, width: int, labels: int, *, rngs: nnx.Rngs):
        self.classifier, self.weights, self.quarters = (label_linear(width, labels, rngs=rngs) for _ in range(3))

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        return ("logits", CLS, QUARTERS)

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        whole, quarters = (partition.shard_images(x).astype(jnp.float32) for x in (features.cls, features.quarters))
        shares = jax.nn.softmax(self.weights(quarters), axis=1)
        terms = {CLS: self.classifier(whole), QUARTERS: jnp.sum(shares * self.quarters(quarters), axis=1)}
        return Prediction((terms[CLS] + terms[QUARTERS]) / 2, terms)
