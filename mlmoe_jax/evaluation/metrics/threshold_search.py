"""Thresholds that turn scores into predictions: a class is predicted if score ≥ threshold.

The thresholds that prediction uses are in thresholds.json of a run folder. Shape letters: N images, K classes. Scores
are f[N,K], labels [N,K] are positive if equal to 1, and a mask [N,K] is 0 for entries to ignore.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from mlmoe_jax.evaluation.metrics.ranking import check_inputs, label_blocks
from mlmoe_jax.runtime.array_types import Bools, Floats, Ints, Reals


# ---------------------------------------------------------------------------------------------------- prior-matched
def prior_matched(
    scores: ArrayLike, train_frequency: ArrayLike, *, mask: ArrayLike | None = None, when_zero: str = "none"
) -> Floats:
    """Return one threshold per class, at which each class is predicted as often as it was positive in training.

    ML-VPT's published CP … OF1 use these thresholds. The threshold of class k is the m-th largest score of the class,
    with m = floor(r_k · N_k) in float64. Here r_k, an entry of `train_frequency` f[K], is the fraction of training
    images with class k, and N_k is the number of evaluated images whose label k is known. All scores equal to the
    threshold are predicted, so there may be more than m predictions. The result f64[K] is infinity for a class without
    known labels.

    If m = 0, the threshold is infinity with `when_zero="none"`, so no image is predicted. With "all" it is the smallest
    score, so all images are predicted, as in ML-VPT's code (where the index m − 1 = −1 wraps around).

    The thresholds are computed from the scores of the evaluated images themselves (transductive). They are for
    comparison with published tables, never for prediction.
    """
    scores, frequency = np.asarray(scores), np.asarray(train_frequency, np.float64)
    scores, _, valid = check_inputs(scores, np.broadcast_to(np.False_, scores.shape), mask)
    known = valid.sum(axis=0)
    count = (frequency * known).astype(np.int64)
    # For m = 0 the authors' index wraps around to the smallest score.
    place = len(scores) - np.maximum(np.where(count > 0, count, known), 1)
    thresholds = np.empty(len(place))
    for some in label_blocks(*scores.shape):
        ascending = np.where(valid[:, some], scores[:, some], -np.inf)
        ascending.sort(axis=0)
        thresholds[some] = np.take_along_axis(ascending, place[None, some], axis=0)[0]
    return np.where({"none": count, "all": known}[when_zero] == 0, np.inf, thresholds)


# ----------------------------------------------------------------------------------------------------------- fitting
def best_thresholds(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    per: str = "class",
    goal: str = "f1",
    precision: float = 0.9,
    miss_rate: float = 0.1,
) -> Floats:
    """Return the thresholds that reach a goal on one split, f64[K] within [0, 1], by exact search over all thresholds.

    The goals are defined with the numbers of predicted (P), positive (G) and correctly predicted (TP) images:

    * "f1": the threshold with the largest F1 = 2TP / (P + G). If several are equal, the highest threshold.
    * "precision": the lowest threshold with TP/P ≥ `precision`, within [0, 1]. It predicts as many positives as
      possible. If no threshold is precise enough, it is infinity, so that the class is never predicted.
    * "miss_rate": a threshold by conformal risk control; see `bounded_misses`.

    Equal scores, which are probabilities, are predicted together. For "f1" and "precision", the threshold is midway
    between the lowest predicted score and the next lower score (0 if there is none), because scores of new images lie
    on both sides of it. For a class without positives the threshold is nan (undetermined). With `per="global"`, one
    threshold is fitted to the entries of all classes together, with "class" one per class.
    """
    scores, positive, valid = check_inputs(scores, labels, mask)
    classes = scores.shape[1]
    if goal == "miss_rate":
        columns = [range(classes)] if per == "global" else [[k] for k in range(classes)]
        bounds = [bounded_misses(scores[:, k], (positive & valid)[:, k], miss_rate) for k in columns]
        return np.broadcast_to(bounds, classes).copy()
    if per == "global":
        scores, positive, valid = (x.reshape(-1, 1) for x in (scores, positive, valid))
    fitted = np.empty(scores.shape[1])
    for some in label_blocks(*scores.shape):
        known = valid[:, some]
        ranked = np.where(known, scores[:, some], -1.0)
        fitted[some] = _best_of_columns(ranked, positive[:, some] & known, goal, precision)
    return np.broadcast_to(fitted, classes).copy()


def least_to_bound(miss_rate: float) -> int:
    """Return the smallest number of images with a present label for which `bounded_misses` can be above 0."""
    return math.ceil(1 / miss_rate - 1e-9) - 1


def bounded_misses(scores: Floats, positive: Bools, miss_rate: float) -> float:
    """Return the highest threshold at which the expected miss rate on a new image is at most `miss_rate`.

    The loss of an image is the share of its present labels (bool[N,C]) with a score (f[N,C]) below the threshold. R is
    the mean loss of the n images that have a present label. The result is the highest threshold with (nR + 1)/(n + 1) ≤
    `miss_rate`, within (0, 1]. If a new image with a present label is exchangeable with these images, its expected loss
    is then at most `miss_rate`, for any model and distribution (Angelopoulos et al. 2022, Conformal Risk Control,
    theorem 1).

    The threshold is the lowest score of a present label that is not missed. It is nan if n is 0, 0 if n is below
    `least_to_bound`, and infinity if `miss_rate` is 1.
    """
    count = positive.sum(axis=1)
    images, present = np.count_nonzero(count), scores[positive]
    if not images:
        return np.nan
    if images < least_to_bound(miss_rate):
        return 0.0
    order = np.argsort(present)
    missed = np.cumsum((positive / np.maximum(count, 1)[:, None])[positive][order])
    beyond = missed > miss_rate * (images + 1) - 1 + 1e-9  # sums of fractions are rounded
    return float(present[order][beyond.argmax()]) if beyond.any() else np.inf


def _best_of_columns(scores: Reals, positive: Bools, goal: str, precision: float) -> Floats:
    """Return the thresholds of `best_thresholds` per column, f64[K]. Ignored entries have score −1 and are negative."""
    if not len(scores):
        return np.full(scores.shape[1], np.nan)
    order = np.argsort(-scores, axis=0)
    scores, positive = (np.take_along_axis(x, order, axis=0) for x in (scores, positive))
    lower = np.concatenate([scores[1:], np.full((1, scores.shape[1]), -1.0, scores.dtype)])
    possible = (scores >= 0) & (scores > lower)  # thresholds below this rank
    hits = np.cumsum(positive, axis=0)
    rank, reached = _best_ranks(possible, hits, goal, precision)
    thresholds = _between(*(np.take_along_axis(x, rank[None], axis=0)[0] for x in (scores, np.maximum(lower, 0))))
    return np.where(hits[-1] == 0, np.nan, np.where(reached, thresholds, np.inf))


def _best_ranks(possible: Bools, hits: Ints, goal: str, precision: float) -> tuple[Ints, Bools]:
    """Return the rank i64[K] of the lowest predicted score per column, and whether a threshold there reaches the goal.

    Rank 0 is the highest score. `possible` says whether a threshold can lie directly below a rank, and `hits` has the
    number of positives up to and including it, both [N,K].
    """
    ranks = np.arange(1, len(hits) + 1)[:, None]
    if goal == "f1":
        value = np.where(possible, 2 * hits / (ranks + hits[-1]), -1.0)
        return value.argmax(axis=0), possible.any(axis=0)
    enough = possible & (hits / ranks >= precision)
    return len(hits) - 1 - enough[::-1].argmax(axis=0), enough.any(axis=0)


def _between(upper: Reals, lower: Reals) -> Floats:
    """Return the midpoint of `upper` and `lower`, f64[K]; `upper` where no float64 number lies between the two."""
    upper, lower = upper.astype(np.float64), lower.astype(np.float64)
    middle = lower + (upper - lower) / 2
    return np.where(middle > lower, middle, upper)
