"""Cuts that turn scores into predictions: a class is predicted where score ≥ threshold.

Shape letters: N images, K classes.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def prior_matched(scores: ArrayLike, train_frequency: ArrayLike, *, when_zero: str = "none") -> NDArray[np.float64]:
    """A cut per class, so that it is predicted as often as it was positive in training.

    ML-VPT's published CP … OF1 are taken at these cuts: the m-th largest score of class k, m = floor(r_k · N) in
    float64, r_k the fraction of training images that show it. They look at the scores of the very images they then cut
    (transductive), so they serve comparison with published tables, never prediction. Equal scores at the cut are all
    predicted, so that there may be more than m.

    Args:
      scores: f[N,K].
      train_frequency: f[K], fractions in [0, 1].
      when_zero: the cut where m = 0. "none": infinity, nothing is predicted. "all": the smallest score, everything is
        predicted, which is what ML-VPT's code does (index m − 1 = −1 wraps around).

    Returns:
      f64[K].

    Raises:
      ValueError: no images, a NaN score, frequencies of another shape or outside [0, 1], unknown `when_zero`.
    """
    if when_zero not in ("none", "all"):
        raise ValueError(f"when_zero must be 'none' or 'all', not {when_zero!r}")
    scores, frequency = np.asarray(scores, np.float64), np.asarray(train_frequency, np.float64)
    if scores.ndim != 2 or not len(scores) or frequency.shape != scores.shape[1:] or np.isnan(scores).any():
        raise ValueError(f"scores must be [N,K] without NaN and frequencies [K], not {scores.shape} {frequency.shape}")
    if not np.all((frequency >= 0) & (frequency <= 1)):
        raise ValueError("train_frequency must be fractions in [0, 1]")
    wanted = (frequency * len(scores)).astype(np.int64)
    ascending = np.sort(scores, axis=0)
    # For m = 0 this is row N − 1 − (−1) = N, wrapped to row 0: the smallest score.
    cuts = np.take_along_axis(ascending, (len(scores) - wanted)[None] % len(scores), axis=0)[0]
    return np.where(wanted == 0, np.inf, cuts) if when_zero == "none" else cuts


def reported(
    scores: ArrayLike, train_frequency: ArrayLike | None = None, *, threshold: float = 0.5
) -> dict[str, float | NDArray[np.float64]]:
    """The named cuts at which a split is reported, for `metrics.evaluate_scores`.

    The fixed threshold under its own value ("0.5"); with train_frequency f[K] also "prior_matched_transductive",
    f64[K].
    """
    cuts: dict[str, float | NDArray[np.float64]] = {f"{threshold:g}": threshold}
    if train_frequency is not None:
        cuts["prior_matched_transductive"] = prior_matched(scores, train_frequency)
    return cuts
