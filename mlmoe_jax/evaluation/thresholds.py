"""Cuts that turn scores into predictions: a class is predicted where score ≥ threshold.

A run folder's thresholds.json holds those that prediction uses. Shape letters: N images, K classes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


# ---------------------------------------------------------------------------------------------------- prior-matched
def prior_matched(
    scores: ArrayLike, train_frequency: ArrayLike, *, mask: ArrayLike | None = None, when_zero: str = "none"
) -> Floats:
    """A cut per class, so that it is predicted as often as it was positive in training.

    ML-VPT's published CP … OF1 are taken at these cuts: the m-th largest score of class k, m = floor(r_k · N_k) in
    float64, r_k the fraction of training images that show it, N_k the images whose label is known. They look at the
    scores of the very images they then cut (transductive), so they serve comparison with published tables, never
    prediction. Equal scores at the cut are all predicted, so that there may be more than m.

    Args:
      scores: f[N,K].
      train_frequency: f[K], fractions in [0, 1].
      mask: [N,K], 0 where a label is unknown, whose score then does not count; None counts all.
      when_zero: the cut where m = 0. "none": infinity, nothing is predicted. "all": the smallest score, everything is
        predicted, which is what ML-VPT's code does (index m − 1 = −1 wraps around).

    Returns:
      f64[K], infinity also for a class without any known label.

    Raises:
      ValueError: no images, a NaN score that counts, frequencies of another shape or outside [0, 1], unknown
        `when_zero`.
    """
    if when_zero not in ("none", "all"):
        raise ValueError(f"when_zero must be 'none' or 'all', not {when_zero!r}")
    scores, frequency = np.asarray(scores, np.float64), np.asarray(train_frequency, np.float64)
    if scores.ndim != 2 or not len(scores) or frequency.shape != scores.shape[1:]:
        raise ValueError(f"scores must be [N,K] and frequencies [K], not {scores.shape} {frequency.shape}")
    if not np.all((frequency >= 0) & (frequency <= 1)):
        raise ValueError("train_frequency must be fractions in [0, 1]")
    valid = _valid(scores, mask)
    known = valid.sum(axis=0)
    wanted = (frequency * known).astype(np.int64)
    ascending = np.sort(np.where(valid, scores, -np.inf), axis=0)
    # For m = 0 the authors' index wraps around to the last of all, the smallest score.
    rank = np.where(wanted > 0, wanted, known)
    cuts = np.take_along_axis(ascending, (len(scores) - np.maximum(rank, 1))[None], axis=0)[0]
    return np.where((wanted if when_zero == "none" else known) == 0, np.inf, cuts)


def reported(
    scores: ArrayLike,
    train_frequency: ArrayLike | None = None,
    *,
    threshold: float = 0.5,
    mask: ArrayLike | None = None,
) -> dict[str, float | Floats]:
    """The named cuts at which a split is reported, for `groups.evaluate_scores`.

    The fixed threshold under its own value ("0.5"); with train_frequency f[K] also "prior_matched_transductive",
    f64[K], see `prior_matched` for `mask`. `Thresholds.cuts_for` adds those that were fitted.
    """
    cuts: dict[str, float | Floats] = {f"{threshold:g}": threshold}
    if train_frequency is not None:
        cuts["prior_matched_transductive"] = prior_matched(scores, train_frequency, mask=mask)
    return cuts


# ----------------------------------------------------------------------------------------------------------- fitting
def fit(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    per: str = "class",
    goal: str = "f1",
    precision: float = 0.9,
) -> Floats:
    """The thresholds that reach a goal on the images of one split, exactly: all cuts between scores are tried.

    With TP of the P predicted and G positive images, "f1" takes the cut with the largest F1 = 2TP / (P + G), of equal
    ones the highest; "precision" the lowest cut with TP/P ≥ precision, so that as many positives as possible are found.
    Equal scores are predicted together. The threshold lies midway between the lowest score that is predicted and the
    next lower one (0 if there is none), since images to come fall on either side of both.

    Args:
      scores: f[N,K], probabilities.
      labels: [N,K], positive where they equal 1.
      mask: [N,K], 0 where an entry must not count; None counts all.
      per: "class", a threshold for each; "global", the same for all, fitted to all entries as if of one class.
      goal: "f1" or "precision".
      precision: the wanted one, within [0, 1].

    Returns:
      f64[K]: within [0, 1]; nan for a class without positives, which says nothing about its threshold; infinity where
      no cut is precise enough: whoever asks for a precision wants no prediction rather than one below it.

    Raises:
      ValueError: wrong shapes, scores that count and are no probabilities, unknown per or goal, impossible precision.
    """
    if per not in ("class", "global") or goal not in ("f1", "precision") or not 0 <= precision <= 1:
        raise ValueError(
            f"per must be 'class' or 'global', goal 'f1' or 'precision', precision within [0, 1], not "
            f"{per!r}, {goal!r}, {precision!r}"
        )
    scores, positive = np.asarray(scores, np.float64), np.asarray(labels) == 1
    if scores.ndim != 2 or scores.shape != positive.shape:
        raise ValueError(f"scores and labels must both be [N,K], not {scores.shape} {positive.shape}")
    valid = _valid(scores, mask)
    if not np.all((scores[valid] >= 0) & (scores[valid] <= 1)):
        raise ValueError("scores must be probabilities in [0, 1]")
    classes = scores.shape[1]
    if per == "global":
        scores, positive, valid = (x.reshape(-1, 1) for x in (scores, positive, valid))
    fitted = _best_cuts(np.where(valid, scores, -1.0), positive & valid, goal, precision)
    return np.broadcast_to(fitted, classes).copy()


def _best_cuts(scores: Floats, positive: NDArray[np.bool_], goal: str, precision: float) -> Floats:
    """`fit` of every column of scores f64[N,K], −1 where an entry does not count."""
    if not len(scores):
        return np.full(scores.shape[1], np.nan)
    order = np.argsort(-scores, axis=0)
    scores, positive = (np.take_along_axis(x, order, axis=0) for x in (scores, positive))
    lower = np.concatenate([scores[1:], np.full((1, scores.shape[1]), -1.0)])
    possible = (scores >= 0) & (scores > lower)  # to cut behind this rank
    found, seen = np.cumsum(positive, axis=0), np.arange(1, len(scores) + 1)[:, None]
    if goal == "f1":
        value = np.where(possible, 2 * found / (seen + found[-1]), -1.0)
        rank, reached = value.argmax(axis=0), possible.any(axis=0)
    else:
        enough = possible & (found / seen >= precision)
        rank, reached = len(scores) - 1 - enough[::-1].argmax(axis=0), enough.any(axis=0)
    upper, lower = (np.take_along_axis(x, rank[None], axis=0)[0] for x in (scores, np.maximum(lower, 0)))
    middle = lower + (upper - lower) / 2
    cuts = np.where(middle > lower, middle, upper)  # no number lies between neighbouring floats
    return np.where(found[-1] == 0, np.nan, np.where(reached, cuts, np.inf))


def _valid(scores: Floats, mask: ArrayLike | None) -> NDArray[np.bool_]:
    """Return which entries count; ValueError for a mask of another shape or a NaN score that counts."""
    valid = np.ones(scores.shape, bool) if mask is None else np.asarray(mask) != 0
    if valid.shape != scores.shape or np.isnan(scores[valid]).any():
        raise ValueError(f"mask must be [N,K] as the scores, which must be no NaN, not {valid.shape} {scores.shape}")
    return valid
