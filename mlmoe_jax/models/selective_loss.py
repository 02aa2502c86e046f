"""The class-aware selective loss for partially labeled images (CSL, the partial asymmetric loss P-ASL).

The formula, the constant FLOOR, and the number of dropped labels follow the authors' code. The paper gives the idea: an
unknown label counts as absent, except if it is likely in the image or frequent in the data set.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from mlmoe_jax.models.losses import Examples, Loss, asymmetric_loss
from mlmoe_jax.models.missing_labels import mixing_mistakes

FLOOR = 1e-8  # lowest probability in a logarithm


class PartialAsymmetric(Loss):
    """The asymmetric loss with an exponent and a weight for positive, negative and unknown labels (CSL).

    With p = σ(logit) and q = min(1 − p + clip, 1), the loss is alpha_pos (1 − p)^gamma_pos · −log p for a positive
    label, and alpha (1 − q)^gamma · −log q otherwise. For a negative label, alpha and gamma are alpha_neg and
    gamma_neg; for an unknown label, alpha_unann and gamma_unann. The powers have no gradient. `loss.unknown` is the
    mode of the paper: ignore, negative or selective. In the mode normalize of the code, the losses of an image with m
    known labels have the factor 1 + 1 / (1 + m). The authors sum the losses up (`loss.reduce=sum`).
    """

    assumes_negatives = True
    modes = ("selective", "normalize")

    def __call__(self, logits, examples):
        settings, labels, known = self.settings, examples.labels, examples.known
        loss = asymmetric_loss(
            logits,
            labels,
            gamma_neg=jnp.where(known, settings.gamma_neg, settings.gamma_unann),
            gamma_pos=settings.gamma_pos,
            clip=settings.clip,
            eps=FLOOR,
        )
        alpha = jnp.where(known, jnp.where(labels == 1, settings.alpha_pos, settings.alpha_neg), settings.alpha_unann)
        if settings.unknown == "selective":
            alpha = jnp.where(self.dropped(logits, examples), 0.0, alpha)
        elif settings.unknown == "normalize":
            alpha *= 1 + 1 / (1 + jnp.sum(known, axis=1, keepdims=True))
        return alpha * loss

    def dropped(self, logits: Float[Array, "b k"], examples: Examples) -> Bool[Array, "b k"]:
        """Return which unknown labels have no loss with `loss.unknown=selective`.

        They are the B · `likelihood_topk` unknown labels of the batch with the largest logits, and the labels whose
        prior is above `prior_threshold`. B is the number of images.
        """
        unknown = ~examples.known & examples.mask[:, None]
        order = jnp.argsort(jnp.where(unknown, -logits, jnp.inf), axis=None)
        rank = jnp.argsort(order).reshape(logits.shape)
        drop = rank < self.settings.likelihood_topk * jnp.sum(examples.mask)
        if self.training is not None and self.training.prior is not None and self.settings.prior_threshold:
            drop |= jnp.asarray(self.training.prior) > self.settings.prior_threshold
        return unknown & drop

    @classmethod
    def mistakes(cls, config):
        return mixing_mistakes(config)
