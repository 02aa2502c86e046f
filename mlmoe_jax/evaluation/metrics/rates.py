"""Precision, recall and F1 from counts, and the means and ratios used by all metrics.

Shape letters: K classes; … any leading axes, such as resamples.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def precision_recall_f1_of(
    hits: ArrayLike, claimed: ArrayLike, actual: ArrayLike, *, fill: float = np.nan
) -> dict[str, Floats]:
    """Return the figures that `multilabel.precision_recall_f1` defines, f64[…] each, from counts.

    hits, claimed, actual: [...,K], counts of true positives, predictions, and positives. fill: the value of 0/0; nan
    leaves a class out of the means, except out of those named macro, where it is 0 for any `fill`.
    """
    hits, claimed, actual = map(np.asarray, (hits, claimed, actual))
    cp, cr = (mean_defined(ratio(hits, count, fill)) for count in (claimed, actual))
    op, or_ = (ratio(hits.sum(axis=-1), count.sum(axis=-1), fill) for count in (claimed, actual))
    f1 = mean_defined(ratio(2 * hits, claimed + actual, fill))
    figures = dict(CP=cp, CR=cr, CF1=harmonic(cp, cr), CF1_mean=f1, OP=op, OR=or_, OF1=harmonic(op, or_))
    macro = dict(precision_macro=(hits, claimed), recall_macro=(hits, actual), F1_macro=(2 * hits, claimed + actual))
    return figures | {name: mean_defined(ratio(*counts, fill=0.0)) for name, counts in macro.items()}


def ratio(numerator: ArrayLike, denominator: ArrayLike, fill: float = np.nan) -> Floats:
    """Return numerator / denominator, `fill` if the denominator is 0."""
    denominator = np.asarray(denominator)
    return np.divide(numerator, denominator, out=np.full(denominator.shape, fill), where=denominator != 0)


def mean_defined(values: ArrayLike) -> Floats:
    """Return the mean over the last axis of the values that are not nan, nan if all are: f64[…] of f64[...,K]."""
    values = np.asarray(values, np.float64)
    if values.ndim > 1:
        return np.array([mean_defined(row) for row in values])
    values = values[~np.isnan(values)]
    return values.mean() if values.size else np.float64(np.nan)


def sample_deviation(values: ArrayLike) -> float:
    """Return the sample standard deviation f64[n] -> √(Σ(x − mean)²/(n − 1)), nan for fewer than two values."""
    values = np.asarray(values, np.float64)
    return float(values.std(ddof=1)) if values.size > 1 else float("nan")


def harmonic(a: ArrayLike, b: ArrayLike) -> Floats:
    """Return the harmonic mean of a and b, both at least 0: 0 if both are."""
    a, b = np.asarray(a), np.asarray(b)
    return np.where((a == 0) & (b == 0), 0.0, ratio(2 * a * b, a + b))
