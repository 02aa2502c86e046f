"""Losses with a value per training image and label: ROLE and LL-Cp."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.losses import Loss
from mlmoe_jax.models.missing_labels import ExpectedPositives, LargeLossCorrection, mixing_mistakes, negative_logs

MOST_VALUES = 2**28  # per training; ROLE needs three times as many, with the moments of Adam
KNOWN = math.log(0.995 / (1 - 0.995))  # initial estimate of a known positive, a logit
SPREAD = math.log(0.6 / (1 - 0.6))  # initial estimates of unknown labels are drawn from U(−SPREAD, SPREAD)


def estimates_shape(loss: Loss) -> tuple[int, int]:
    """Return [N,K], the shape of values per training image and label; UserError if they are too many."""
    images, labels = loss.training_labels().codes.shape
    if images * labels > MOST_VALUES:
        raise UserError(
            f"loss.kind={loss.settings.kind} keeps a value for each of {images:,} training images and {labels:,} "
            f"labels, and at most {MOST_VALUES:,} values are possible: choose another loss.kind"
        )
    return images, labels


class ROLE(ExpectedPositives):
    """Regularized online label estimation (SP): the unknown labels are estimated together with the model.

    With p = σ(logit), q = σ(estimate) and n(x) = −log(x + 1e-5), the loss is half the sum of y (n(p) + n(q)), of the
    cross-entropies of p with the target q and of q with the target p, and of R(p) and R(q). Targets have no gradient.

    The estimates are logits, one per training image and label. Unlike the authors' Adam, the optimizer of the model
    updates them, at ten times its learning rate and without weight decay.
    """

    keeps_values, trained_names = True, ("estimates",)

    @classmethod
    def mistakes(cls, config):
        return [*super().mistakes(config), *mixing_mistakes(config)]

    def trained_values(self):
        shape = estimates_shape(self)
        training = self.training_labels()
        uniform = np.random.default_rng(training.seed).uniform(-SPREAD, SPREAD, shape).astype(np.float32)
        positive, known = targets(training.codes, training.difficult)
        return {"estimates": np.where(known, np.where(positive, KNOWN, -KNOWN), uniform).astype(np.float32)}

    def __call__(self, logits, examples):
        estimates = examples.values["estimates"]
        penalties = [self.penalty(jax.nn.sigmoid(x), examples) for x in (logits, estimates)]
        probabilities = [jax.lax.stop_gradient(jax.nn.sigmoid(x)) for x in (estimates, logits)]
        total = examples.labels * (negative_logs(logits)[0] + negative_logs(estimates)[0])
        for x, target in zip((logits, estimates), probabilities, strict=True):
            present, absent = negative_logs(x)
            total += target * present + (1 - target) * absent
        return total / 2 + sum(penalties) / 2


class LargeLossPermanentCorrection(LargeLossCorrection):
    """LL-Cp, as the LL paper describes it: corrected labels stay known positives in all later steps.

    The share of corrected labels per step is `large_loss_rate` from the second epoch on. As in LL-Ct, labels with a
    loss at or above the threshold count as present in the step; only those above it are stored. The authors' released
    program compares the name of the method by identity and therefore runs LL-Ct.
    """

    keeps_values = True

    def num_corrections(self, epoch):
        return epoch > 0

    def current_labels(self, examples):
        labels, unknown = super().current_labels(examples)
        corrected = examples.values["corrected"] > 0
        return jnp.maximum(labels, corrected), unknown & ~corrected

    def tracked_values(self):
        return {"corrected": np.zeros(estimates_shape(self), np.int8)}

    def track(self, logits, examples):
        candidates = self.candidates(logits, examples)
        above = (candidates > self.threshold(candidates, examples)) & examples.mask[:, None]
        return {"corrected": jnp.maximum(examples.values["corrected"], above.astype(jnp.int8))}
