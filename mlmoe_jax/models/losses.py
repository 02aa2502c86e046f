"""Losses per element, their builders, and their reduction.

Axes: b images, k labels. Labels are in [0, 1]. `catalog` lists the builders and documents their interface.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Num
from ml_collections import ConfigDict

if TYPE_CHECKING:
    from mlmoe_jax.models.catalog import Balance, PerElement


def asymmetric_loss(
    logits: Float[ArrayLike, "*shape"],
    labels: Num[ArrayLike, "*shape"],
    *,
    gamma_neg: float,
    gamma_pos: float,
    clip: float,
    eps: float = 1e-8,
    detach: bool = True,
) -> Float[Array, "*shape"]:
    """Return the asymmetric loss (ASL, eq. 4–7), per element.

    With p = sigmoid(logit) and q = min(1 − p + clip, 1):
    loss = −y (1 − p)^gamma_pos log max(p, eps) − (1 − y) (1 − q)^gamma_neg log max(q, eps).
    The clip shifts the weight and the logarithm: a negative with p ≤ clip has no loss and no gradient.
    The gradient through a logarithm at its floor log(eps) is 0.

    Args:
      gamma_neg: focusing exponent of the negatives, ≥ 0.
      gamma_pos: focusing exponent of the positives, ≥ 0.
      clip: probability margin of the negatives, in [0, 1).
      eps: floor of both probabilities inside the logarithm, above 0.
      detach: treat the focusing weight as a constant in the gradient, as the training code of ASL, Q2L and ML-VPT does.

    Returns:
      Values ≥ 0. gamma_neg = gamma_pos = clip = 0 is binary cross-entropy, capped at −log(eps).
    """
    logits, labels = _as_float(logits), _as_float(labels)
    floor = jnp.log(eps)
    log_p = jax.nn.log_sigmoid(logits)
    # log(1 − p + clip) is precise for p near 1 in log space. clip = 0 needs no special case, because log(0) = −inf.
    log_q = jnp.minimum(jnp.logaddexp(jax.nn.log_sigmoid(-logits), jnp.log(clip)), 0.0)
    weight_p = _focus(jax.nn.sigmoid(-logits), gamma_pos, detach)
    weight_q = _focus(jax.nn.sigmoid(logits) - clip, gamma_neg, detach)
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
    logits, labels = _as_float(logits), _as_float(labels)
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
    logits, labels = _as_float(logits), _as_float(labels)
    alpha_p, alpha_q = (1.0, 1.0) if alpha is None else (alpha, 1 - jnp.asarray(alpha))
    positive = alpha_p * _focus(jax.nn.sigmoid(-logits), gamma, detach) * jax.nn.log_sigmoid(logits)
    negative = alpha_q * _focus(jax.nn.sigmoid(logits), gamma, detach) * jax.nn.log_sigmoid(-logits)
    return -(labels * positive + (1 - labels) * negative)


def softmax_cross_entropy(
    logits: Float[ArrayLike, "*rows k"], labels: Num[ArrayLike, "*rows k"]
) -> Float[Array, "*rows k"]:
    """Return −y log softmax(x) over the labels, per element; for images with exactly one label, one-hot.

    Its sum over the labels is the cross-entropy of an image.
    """
    return -jnp.asarray(labels) * jax.nn.log_softmax(_as_float(logits), axis=-1)


# ------------------------------------------------------------------------------------------------- losses of a config
def build_asymmetric(settings: ConfigDict, balance: Balance) -> PerElement:
    """Return the asymmetric loss of `config.loss`."""
    names = ("gamma_neg", "gamma_pos", "clip", "eps", "detach")
    return partial(asymmetric_loss, **{name: settings[name] for name in names})


def build_bce(settings: ConfigDict, balance: Balance) -> PerElement:
    """Return binary cross-entropy with `loss.positive_weight`, or with `balance()` if `loss.positive_weight` is 0."""
    weight = settings.positive_weight or (balance() if balance else None)
    return partial(binary_cross_entropy, positive_weight=weight)


def build_focal(settings: ConfigDict, balance: Balance) -> PerElement:
    """Return the focal loss of `config.loss`, with equal weights of positives and negatives."""
    return partial(focal_loss, gamma=settings.gamma, detach=settings.detach)


def build_softmax(settings: ConfigDict, balance: Balance) -> PerElement:
    """Return the softmax cross-entropy, which has no settings."""
    return softmax_cross_entropy


# ----------------------------------------------------------------------------------------------------------- reduction
def count_valid(label_mask: Num[ArrayLike, "b k"], mask: Num[ArrayLike, " b"]) -> Integer[Array, ""]:
    """Return the number of valid entries, see `reduce`."""
    return jnp.sum(_valid(label_mask, mask))


def _valid(label_mask: ArrayLike, mask: ArrayLike) -> Array:
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
      per_element: the losses.
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
    valid = _valid(label_mask, mask)
    total = jnp.sum(jnp.where(valid, _as_float(per_element), 0.0))
    if how == "mean":
        total = total / jnp.maximum(jnp.sum(valid) if count is None else count, 1)
    return scale * total


def _focus(miss: Array, gamma: float, detach: bool) -> Array:
    """Return miss^gamma for the probability `miss` of the wrong label; negative values (below the clip) count as 0."""
    # The derivative of 0^gamma is infinite for gamma < 1, and infinity times a zero gradient is NaN.
    weight = jnp.maximum(miss, jnp.finfo(miss.dtype).tiny) ** gamma
    return jax.lax.stop_gradient(weight) if detach else weight


def _as_float(x: ArrayLike) -> Array:
    """Convert to at least float32, because a sum of bfloat16 losses has only two digits."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
