"""The interface of losses, losses per element, and their reduction. `missing_labels.py` has further losses.

Axes: b images, k labels; N training images. Labels are in [0, 1].
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Num
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError

if TYPE_CHECKING:
    from mlmoe_jax.data.labels.counts import TrainingLabels


LOSS_VALUES = "loss/"  # begins the paths of values with a row per training image


# ----------------------------------------------------------------------------------------------------------- interface
class Examples(NamedTuple):
    """The inputs of a loss besides logits, for the images of a step, or a part (`train.accumulate`), on all devices."""

    labels: Array  # f32[B,K] in [0, 1]; 0 for unknown labels
    known: Array  # bool[B,K], whether each label is known
    mask: Array  # bool[B], False for padding
    epoch: Array | int = 0  # i32[], the number of whole epochs before the step
    # Name -> [B,K], the rows of `Loss.trained_values` and `Loss.tracked_values` for these images
    values: Mapping[str, Array] = {}


class Loss(abc.ABC):
    """The base class of all losses. Weights, masks and the reduction to one number are applied afterwards.

    `settings` is `config.loss`. The training labels may be None, and are read only by losses that depend on them.
    """

    assumes_negatives: ClassVar[bool] = False
    """Whether unknown labels count as absent with `loss.unknown=auto`. If False, they have no loss."""

    averages_all: ClassVar[bool] = False
    """Whether a mean includes the unknown labels that have no loss, each as 0. If False, it is over all others."""

    modes: ClassVar[tuple[str, ...]] = ()
    """The values of `loss.unknown` that only this loss has."""

    keeps_values: ClassVar[bool] = False
    """Whether the loss has values with a row per training image, `trained_values` or `tracked_values`."""

    trained_names: ClassVar[tuple[str, ...]] = ()
    """The keys of `trained_values`, known without making the large arrays."""

    def __init__(self, settings: ConfigDict, training: TrainingLabels | None = None):
        self.settings = settings
        self.training = training

    @classmethod
    def reads_negatives(cls, settings: ConfigDict) -> bool:
        """Return whether at least some unknown labels count as absent; `settings` is `config.loss`."""
        as_absent = ("negative", "selective", "auto" if cls.assumes_negatives else "")
        return settings.unknown in as_absent

    @abc.abstractmethod
    def __call__(self, logits: Float[Array, "b k"], examples: Examples) -> Float[Array, "b k"]:
        """Return the loss per element."""

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        """Return the errors in a config with this loss, one sentence without a final period each."""
        return []

    @classmethod
    def label_mistakes(cls, config: ConfigDict, training: TrainingLabels) -> list[str]:
        """Return why the training labels do not suit the loss, one sentence without a final period each."""
        if cls.reads_negatives(config.loss) or training.has_negatives() or not training.unknown_share:
            return []
        return [
            f"loss.kind={config.loss.kind} leaves out unknown labels, and no training label is known to be absent: set "
            "loss.unknown=negative, or a loss.kind for missing labels"
        ]

    def training_labels(self) -> TrainingLabels:
        """Return the training labels; UserError if they are unknown."""
        if self.training is None:
            raise UserError(
                f"loss.kind={self.settings.kind} depends on the training labels; pass the labels to make_loss"
            )
        return self.training

    def trained_values(self) -> dict[str, np.ndarray]:
        """Return the initial values {name: f32[N,K]} of arrays that the optimizer updates; {} by default."""
        return {}

    def tracked_values(self) -> dict[str, np.ndarray]:
        """Return the initial values {name: [N,K]}, at least 0, of arrays that `track` updates; {} by default."""
        return {}

    def track(self, logits: Float[Array, "b k"], examples: Examples) -> dict[str, Array]:
        """Return new values {name: [B,K]} for the rows of the images in `tracked_values`; {} by default.

        New values must not be below the old values, which are in `examples.values`.
        """
        return {}


# -------------------------------------------------------------------------------------------------- losses per element
def asymmetric_loss(
    logits: Float[ArrayLike, "*shape"],
    labels: Num[ArrayLike, "*shape"],
    *,
    gamma_neg: ArrayLike,
    gamma_pos: float,
    clip: float,
    eps: float = 1e-8,
    detach: bool = True,
) -> Float[Array, "*shape"]:
    """Return the asymmetric loss (ASL, eq. 4–7), per element.

    With p = sigmoid(logit) and q = min(1 − p + clip, 1):
    loss = −y (1 − p)^gamma_pos log max(p, eps) − (1 − y) (1 − q)^gamma_neg log max(q, eps).
    The clip shifts the weight and the logarithm: a negative with p ≤ clip has no loss and no gradient. The gradient
    through a logarithm at its floor log(eps) is 0. gamma_neg = gamma_pos = clip = 0 is binary cross-entropy, capped at
    −log(eps).

    Args:
      gamma_neg: focusing exponent of the negatives, ≥ 0, a number or one per label.
      gamma_pos: focusing exponent of the positives, ≥ 0.
      clip: probability margin of the negatives, in [0, 1).
      eps: floor of both probabilities inside the logarithm, above 0.
      detach: treat the focusing weight as a constant in the gradient, as the training code of ASL, Q2L and ML-VPT does.
    """
    logits, labels = as_float(logits), as_float(labels)
    floor = jnp.log(eps)
    log_p = jax.nn.log_sigmoid(logits)
    # log(1 − p + clip) is precise for p near 1 in log space. clip = 0 needs no special case, because log(0) = −inf.
    log_q = jnp.minimum(jnp.logaddexp(jax.nn.log_sigmoid(-logits), jnp.log(clip)), 0.0)
    weight_p = focus(jax.nn.sigmoid(-logits), gamma_pos, detach)
    weight_q = focus(jax.nn.sigmoid(logits) - clip, gamma_neg, detach)
    positive = weight_p * jnp.maximum(log_p, floor)
    negative = weight_q * jnp.maximum(log_q, floor)
    return -(labels * positive + (1 - labels) * negative)


def binary_cross_entropy(
    logits: Float[ArrayLike, "*shape"], labels: Num[ArrayLike, "*shape"], *, positive_weight: ArrayLike | None = None
) -> Float[Array, "*shape"]:
    """Return −w y log p − (1 − y) log(1 − p), per element, exact for all finite logits.

    Args:
      positive_weight: w, a number or one per label; None is 1. The usual choice is negatives / positives of the
        training set.
    """
    logits, labels = as_float(logits), as_float(labels)
    weight: Any = 1.0 if positive_weight is None else positive_weight
    return -(weight * labels * jax.nn.log_sigmoid(logits) + (1 - labels) * jax.nn.log_sigmoid(-logits))


def focal_loss(
    logits: Float[ArrayLike, "*shape"],
    labels: Num[ArrayLike, "*shape"],
    *,
    gamma: float = 2.0,
    alpha: ArrayLike | None = None,
    detach: bool = False,
) -> Float[Array, "*shape"]:
    """Return the focal loss (Focal loss, eq. 4–5), per element: −α_t (1 − p_t)^gamma log p_t.

    Args:
      gamma: focusing exponent, ≥ 0; 0 without alpha is binary cross-entropy.
      alpha: weight of the positives in [0, 1], a number or one per label; negatives have 1 − alpha. None: both weights
        are 1.
      detach: treat the focusing weight as a constant in the gradient.
    """
    logits, labels = as_float(logits), as_float(labels)
    alpha_p, alpha_q = (1.0, 1.0) if alpha is None else (alpha, 1 - jnp.asarray(alpha))
    positive = alpha_p * focus(jax.nn.sigmoid(-logits), gamma, detach) * jax.nn.log_sigmoid(logits)
    negative = alpha_q * focus(jax.nn.sigmoid(logits), gamma, detach) * jax.nn.log_sigmoid(-logits)
    return -(labels * positive + (1 - labels) * negative)


def focus(miss: Array, gamma: ArrayLike, detach: bool = False) -> Array:
    """Return `miss` ** `gamma`, where `miss` is the probability of the wrong label.

    A negative `miss`, which can result from the clip, counts as 0. `detach` stops the gradient.
    """
    # The derivative of 0^gamma is infinite for gamma < 1, and infinity times a zero gradient is NaN.
    weight = jnp.maximum(miss, jnp.finfo(miss.dtype).tiny) ** gamma
    return jax.lax.stop_gradient(weight) if detach else weight


def softmax_cross_entropy(
    logits: Float[ArrayLike, "*rows k"], labels: Num[ArrayLike, "*rows k"]
) -> Float[Array, "*rows k"]:
    """Return −y log softmax(x) for one-hot labels y, per element. Their sum is the cross-entropy of an image."""
    return -jnp.asarray(labels) * jax.nn.log_softmax(as_float(logits), axis=-1)


# ------------------------------------------------------------------------------------------------- losses of a config
class Asymmetric(Loss):
    """The asymmetric loss."""

    def __call__(self, logits, examples):
        names = ("gamma_neg", "gamma_pos", "clip", "eps")
        return asymmetric_loss(logits, examples.labels, **{name: self.settings[name] for name in names})


class BinaryCrossEntropy(Loss):
    """Binary cross-entropy. `loss.positive_weight=0` weights positives by negatives / positives of each label."""

    def __init__(self, settings, training=None):
        super().__init__(settings, training)
        self.weight = settings.positive_weight or None
        if training is not None and not settings.positive_weight:
            self.weight = training.negatives_over_positives(self.reads_negatives(settings))

    def __call__(self, logits, examples):
        return binary_cross_entropy(logits, examples.labels, positive_weight=self.weight)


class Focal(Loss):
    """The focal loss with equal weights of positives and negatives."""

    def __call__(self, logits, examples):
        return focal_loss(logits, examples.labels, gamma=self.settings.gamma, detach=True)


class Softmax(Loss):
    """The softmax cross-entropy."""

    def __call__(self, logits, examples):
        return softmax_cross_entropy(logits, examples.labels)


# ----------------------------------------------------------------------------------------------------------- reduction
def valid_entries(label_mask: Num[ArrayLike, "b k"], mask: Num[ArrayLike, " b"]) -> Bool[Array, "b k"]:
    """Return bool[B,K], True where `label_mask` and `mask` are both nonzero."""
    return (jnp.asarray(label_mask) != 0) & (jnp.asarray(mask) != 0)[:, None]


def reduce(
    per_element: Float[ArrayLike, "b k"],
    label_mask: Num[ArrayLike, "b k"],
    mask: Num[ArrayLike, " b"],
    *,
    how: str = "mean",
    scale: float = 1.0,
    count: ArrayLike | None = None,
) -> Float[Array, ""]:
    """Reduce to a scalar over the valid entries, for which label_mask and mask are both nonzero.

    An invalid entry affects neither the value nor the gradient with respect to `per_element`, even if it is NaN. Labels
    of masked entries must be finite, because a NaN label makes the derivative of the loss NaN, and 0 × NaN is NaN.

    Args:
      label_mask: 0 = unknown or ignored.
      mask: 0 = padding.
      how: "mean" (1/(B·K) Σ for a full batch) or "sum" over the valid entries. ML-VPT and Q2L use "mean" × 1000, ASL
        and ML-Decoder "sum".
      scale: factor of the result.
      count: the divisor of a mean; None = the number of valid entries. With the count of a whole batch, the means of
        its parts add up to the mean of the batch.

    Returns:
      The scalar, 0 if no entry is valid.
    """
    valid = valid_entries(label_mask, mask)
    total = jnp.sum(jnp.where(valid, as_float(per_element), 0.0))
    if how == "mean":
        total = total / jnp.maximum(jnp.sum(valid) if count is None else count, 1)
    return scale * total


def as_float(x: ArrayLike) -> Array:
    """Return `x` as float32, or as float64 if it is float64. A sum of bfloat16 losses would have only two digits."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
