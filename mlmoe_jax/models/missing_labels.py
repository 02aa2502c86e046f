"""Losses for training labels of which some positives are missing: RL, LL, SP and DB in docs/methods.md.

Axes: b images, k labels. p = σ(logit). Unknown labels count as absent unless a loss says otherwise.

LL ranks the losses of all images of a step, and R(p) of SP is a penalty of all images of a step, on all devices. With
`train.accumulate`, these are the images of one part of the batch. RL sums the losses up (`loss.reduce=sum`). LL, SP and
DB take their mean.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.losses import Examples, Loss, binary_cross_entropy, focal_loss, focus

LOG_OFFSET = 1e-5  # SP adds it to probabilities in logarithms
MOST_VALUES = 2**28  # per training; ROLE needs three times as many, with the moments of Adam
KNOWN = math.log(0.995 / (1 - 0.995))  # initial estimate of a known positive, a logit
SPREAD = math.log(0.6 / (1 - 0.6))  # initial estimates of unknown labels are drawn from U(−SPREAD, SPREAD)


# ---------------------------------------------------------------------------------------------------------- RL: robust
class Hill(Loss):
    """The Hill loss (RL): y (1 − p_m)^gamma softplus(margin − x) + (1 − y) (peak − p) p², with p_m = σ(x − margin).

    y is the label and x the logit. For peak = 1.5 the gradient of a negative is 3 p² (1 − p)², small for p near 1: a
    negative with a high score may be a missing positive.
    """

    assumes_negatives = True
    margin = 1.0
    peak = 1.5

    def __call__(self, logits, examples):
        p = jax.nn.sigmoid(logits)
        below_margin = self.margin - logits
        positive = focus(jax.nn.sigmoid(below_margin), self.settings.gamma) * jax.nn.softplus(below_margin)
        return examples.labels * positive + (1 - examples.labels) * (self.peak - p) * jnp.square(p)


class FocalMargin(Loss):
    """SPLC without corrections (RL): the focal loss, where `margin` is subtracted from the logits of present labels."""

    assumes_negatives = True
    margin = 1.0

    def targets(self, logits: Array, examples: Examples) -> Array:
        """Return the labels f32[B,K] after corrections. Labels that a correction made positive have no margin."""
        return examples.labels

    def __call__(self, logits, examples):
        shifted = logits - self.margin * (examples.labels == 1)
        return focal_loss(shifted, self.targets(logits, examples), gamma=self.settings.gamma)


class SPLC(FocalMargin):
    """Self-paced loss correction (RL): after the first epoch, absent labels with a high score count as present."""

    min_probability = 0.6
    first_epoch = 1

    def targets(self, logits, examples):
        confident = jax.nn.sigmoid(logits) > self.min_probability
        corrected = confident & (examples.labels != 1) & (examples.epoch >= self.first_epoch)
        return jnp.maximum(examples.labels, corrected)


def _needs_unknown(config: ConfigDict) -> list[str]:
    if config.loss.unknown != "ignore":
        return []
    return [f"loss.kind={config.loss.kind} learns from unknown labels: set loss.unknown=auto"]


def mixing_mistakes(config: ConfigDict) -> list[str]:
    """Return an error message if images are mixed, for losses that need the unknown labels of each image; else []."""
    if config.augment.mix == "none":
        return []
    return [f"loss.kind={config.loss.kind} needs the labels of single images: set augment.mix=none"]


# ------------------------------------------------------------------------------------------------------ LL: large loss
class LargeLossRejection(Loss):
    """LL-R: binary cross-entropy without the unknown labels with the largest losses.

    In epoch e = 0, 1, …, the ⌈B·K·e·rate⌉ largest losses of unknown labels are set to 0. `rate` is
    `config.loss.large_loss_rate`. The mean still includes these elements. Losses of known labels never change. The
    authors' running sum of rates sometimes rounds to one label more.
    """

    assumes_negatives = True

    def __call__(self, logits, examples):
        labels, unknown = self.current_labels(examples)
        candidates = self.candidates(logits, examples)
        large = unknown & (candidates >= self.threshold(candidates, examples))
        return jnp.where(large, self.replacement(logits), binary_cross_entropy(logits, labels))

    def candidates(self, logits: Array, examples: Examples) -> Array:
        """Return the binary cross-entropies f32[B,K] of unknown labels, and 0 for known labels."""
        labels, unknown = self.current_labels(examples)
        return jnp.where(unknown, binary_cross_entropy(logits, labels), 0.0)

    def current_labels(self, examples: Examples) -> tuple[Array, Array]:
        """Return the labels f32[B,K] of this step, and bool[B,K], True for unknown labels."""
        return examples.labels, ~examples.known & examples.mask[:, None]

    def threshold(self, candidates: Array, examples: Examples) -> Array:
        """Return the threshold f32[]: losses of unknown labels at or above it are replaced; +∞ if none is replaced."""
        entries = jnp.sum(examples.mask) * candidates.shape[1]
        exact = entries * (self.settings.large_loss_rate * self.num_corrections(jnp.asarray(examples.epoch)))
        count = jnp.ceil(exact * (1 - 1e-6)).astype(jnp.int32)
        ordered = jnp.sort(jax.lax.stop_gradient(candidates), axis=None, descending=True)
        return jnp.where(count > 0, ordered[jnp.clip(count, 1, candidates.size) - 1], jnp.inf)

    def num_corrections(self, epoch: Array) -> Array:
        """Return the factor of `large_loss_rate`; the product is the share of labels whose losses are replaced."""
        return epoch

    def replacement(self, logits: Array) -> Array:
        """Return the values f32[B,K] that replace large losses."""
        return jnp.zeros_like(logits)

    @classmethod
    def mistakes(cls, config):
        return [*_needs_unknown(config), *mixing_mistakes(config)]

    @classmethod
    def label_mistakes(cls, config, training):
        unknown = training.unknown_share
        settings = config.loss
        most = settings.large_loss_rate * (config.train.epochs - 1)
        if unknown and most <= unknown:
            return []
        return [
            f"loss.kind={settings.kind} changes up to {most:.1%} of the training labels, of which {unknown:.1%} are "
            "unknown: lower loss.large_loss_rate or train.epochs, or set data.known_positives or another loss.kind"
        ]


class LargeLossCorrection(LargeLossRejection):
    """LL-Ct: as LL-R, but the labels with the largest losses count as present for the step."""

    def replacement(self, logits):
        return binary_cross_entropy(logits, jnp.ones_like(logits))


# -------------------------------------------------------------------------------------------------- SP: single positive
def negative_logs(logits: Array) -> tuple[Array, Array]:
    """Return n(p) and n(1 − p) for p = σ(logits) and n(x) = −log(x + 1e-5)."""
    return -jnp.log(jax.nn.sigmoid(logits) + LOG_OFFSET), -jnp.log(jax.nn.sigmoid(-logits) + LOG_OFFSET)


class AssumeNegative(Loss):
    """AN: binary cross-entropy with 1e-5 in its logarithms, y n(p) + (1 − y) n(1 − p) for the label y."""

    assumes_negatives = True
    smoothing = 0.0

    def negative_weight(self, labels: int) -> float:
        """Return the factor of the loss of a negative, for a number of labels."""
        return 1.0

    def __call__(self, logits, examples):
        labels = examples.labels * (1 - 2 * self.smoothing) + self.smoothing
        present, absent = negative_logs(logits)
        return labels * present + self.negative_weight(logits.shape[1]) * (1 - labels) * absent


class IgnoreUnknown(AssumeNegative):
    """IU: AN for known labels. The mean includes the unknown labels, with loss 0, as in the authors' code."""

    assumes_negatives = False
    averages_all = True


class WeakAssumeNegative(AssumeNegative):
    """WAN: AN in which negatives have the weight 1 / (K − 1)."""

    def negative_weight(self, labels):
        return 1 / max(1, labels - 1)


class SmoothedAssumeNegative(AssumeNegative):
    """AN-LS: AN with the labels 1 − smoothing instead of 1, and smoothing instead of 0."""

    smoothing = 0.1


class ExpectedPositives(Loss):
    """EPR: the loss of the positives, plus `penalty` at every element, so that the mean over elements has it once."""

    assumes_negatives = True

    def __call__(self, logits, examples):
        return examples.labels * negative_logs(logits)[0] + self.penalty(jax.nn.sigmoid(logits), examples)

    def penalty(self, probabilities: Array, examples: Examples) -> Array:
        """Return R(p) = (mean number of positives per image − `config.loss.expected_positives`)² / K².

        The number of positives of an image is the sum of its probabilities p.
        """
        counts = jnp.where(examples.mask, probabilities.sum(axis=1), 0.0)
        mean = counts.sum() / jnp.maximum(examples.mask.sum(), 1)
        return jnp.square((mean - self.settings.expected_positives) / probabilities.shape[1])

    @classmethod
    def mistakes(cls, config):
        wrong = _needs_unknown(config)
        kind = config.loss.kind
        if not config.loss.expected_positives:
            wrong.append(
                f"loss.kind={kind} needs loss.expected_positives, the mean number of labels per image (COCO 2.9)"
            )
        return wrong


# ---------------------------------------------------------------------------------------------------------- DB: balance
class DistributionBalanced(Loss):
    """The distribution-balanced loss (DB): balance · (1 − e^−b)^gamma w b.

    Label k has n_k positives in the N training images, y are the labels of the image, and x is the logit.
    The weight is w = alpha + σ(beta (r − mu)), with r = (1 / n_k) / Σ_j y_j / n_j.
    b is the binary cross-entropy of the logit s = x + bias / negative_scale · log(n_k / (N − n_k)).
    The factor `balance` is 2 if gamma > 0, else 1. Negatives have the logit negative_scale · s and the weight w /
    negative_scale. n_k counts as at least 1 and at most N − 1; the authors' code gives NaN for 0 and N.

    The constants are the authors' values for COCO. For VOC, mu is 0.3 and negative_scale 5.
    """

    assumes_negatives = True
    alpha = 0.1
    beta = 10.0
    mu = 0.2
    negative_scale = 2.0
    bias = 0.05

    def __call__(self, logits, examples):
        training = self.training_labels()
        images = len(training.codes)
        labels = examples.labels
        gamma = self.settings.gamma
        frequency = jnp.clip(jnp.asarray(training.positives, jnp.float32), 1, max(1, images - 1))
        present = jnp.sum(labels / frequency, axis=1, keepdims=True)
        ratio = 1 / (frequency * jnp.maximum(present, jnp.finfo(logits.dtype).tiny))
        weight = self.alpha + jax.nn.sigmoid(self.beta * (ratio - self.mu))
        odds = frequency / jnp.maximum(images - frequency, 1)
        shifted = logits + self.bias / self.negative_scale * jnp.log(odds)
        scale = labels + self.negative_scale * (1 - labels)
        entropy = binary_cross_entropy(scale * shifted, labels)
        balance = 2.0 if gamma else 1.0  # as in the authors' code
        weighted = balance * focus(-jnp.expm1(-entropy), gamma) * entropy * weight
        return weighted * (labels + (1 - labels) / self.negative_scale)


# ------------------------------------------------------------------------------- values per training image and label
def estimates_shape(loss: Loss) -> tuple[int, int]:
    """Return (N, K), the numbers of training images and labels. Raises UserError if N·K is above MOST_VALUES."""
    images, labels = loss.training_labels().codes.shape
    if images * labels > MOST_VALUES:
        raise UserError(
            f"loss.kind={loss.settings.kind} keeps a value for each of {images:,} training images and {labels:,} "
            f"labels, and at most {MOST_VALUES:,} values are possible: choose another loss.kind"
        )
    return images, labels


class ROLE(ExpectedPositives):
    """Regularized online label estimation (SP): the unknown labels are estimated together with the model.

    The estimates are logits, one per training image and label. Let y be the label, p = σ(logit), q = σ(estimate) and
    n(x) = −log(x + 1e-5). The loss is half the sum of y (n(p) + n(q)), of the cross-entropy of p with the target q, of
    the cross-entropy of q with the target p, and of R(p) and R(q). R is the penalty of ExpectedPositives. Targets have
    no gradient.

    The optimizer of the model updates the estimates, at ten times its learning rate and without weight decay. The
    authors' code updates them with Adam instead.
    """

    keeps_values, trained_names = True, ("estimates",)

    @classmethod
    def mistakes(cls, config):
        return [*super().mistakes(config), *mixing_mistakes(config)]

    def trained_values(self):
        shape = estimates_shape(self)
        training = self.training_labels()
        uniform = np.random.default_rng(training.seed).uniform(-SPREAD, SPREAD, shape).astype(np.float32)
        positive, known = targets(np.asarray(training.codes), training.difficult)
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
    loss at or above the threshold count as present in the step; only labels with a loss above it are stored. The
    authors' released program compares the name of the method by identity and therefore runs LL-Ct.
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
