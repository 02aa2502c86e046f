"""Multi-label metrics over a whole split: exact, in float64, on the host.

Axes: b images, k classes. In all functions, `scores` are real numbers, larger = more likely; `labels` are positive if
equal to 1 (0, −1 and False are negative); `mask` is 0 for entries to ignore (padding, unknown or difficult labels), or
None. Results are fractions in [0, 1], and nan if undefined.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Num, Shaped
from numpy.typing import ArrayLike

from mlmoe_jax.evaluation.metrics.ranking import (
    INTERPOLATIONS,
    as_flags,
    check_inputs,
    rank_all,
    rank_classes,
    row_blocks,
)
from mlmoe_jax.runtime.array_types import Floats, Ints

ScoreMatrix = Num[np.ndarray, "b k"]
LabelArray = Shaped[np.ndarray, "b k"]
PerClass = Float[np.ndarray, " k"]


def average_precision(
    scores: ScoreMatrix, labels: LabelArray, *, mask: LabelArray | None = None, interpolation: str = "none"
) -> PerClass:
    """Return the average precision (AP) per class; nan for a class without positives.

    Entries with equal scores are one step of the precision-recall curve, so their order does not matter. (In published
    evaluators it depends on the sort. Without ties, all evaluators agree.) The values of `interpolation` are:

    * "none": mean of the precision at each positive (scikit-learn, ML-GCN, ADD-GCN, ASL, ML-Decoder).
    * "envelope": as "none", but each precision is replaced by the largest precision at this or any higher recall (VOC
      2010+, SSGRL, Q2L, ML-VPT). It is never below "none".
    * "11point": mean of this largest precision at recall 0, 0.1 … 1 (VOC 2007; recalls are compared exactly).

    Raises ValueError for an unknown interpolation, wrong shapes, or a NaN score in a valid entry.
    """
    return np.array([r.average_precision(interpolation) for r in rank_classes(*check_inputs(scores, labels, mask))])


def roc_auc(scores: ScoreMatrix, labels: LabelArray, *, mask: LabelArray | None = None) -> PerClass:
    """Return the area under the ROC curve (AUC) per class; nan for a class without a positive or without a negative.

    It is the probability that a positive has a higher score than a negative. Equal scores count half.
    """
    return np.array([r.roc_auc() for r in rank_classes(*check_inputs(scores, labels, mask))])


def per_class(
    scores: ScoreMatrix, labels: LabelArray, *, mask: LabelArray | None = None
) -> dict[str, Num[np.ndarray, " k"]]:
    """Return all ranking metrics per class, from one sort per class, as arrays [K] by name.

    "positives" (i64) is the number of positives. "AP", "AP_envelope" and "AP_11point" are the average precision with
    each interpolation, and "AUC" is the result of `roc_auc`.
    """
    ranked = [
        (r.positives, *(r.average_precision(kind) for kind in INTERPOLATIONS), r.roc_auc())
        for r in rank_classes(*check_inputs(scores, labels, mask))
    ]
    positives, *metrics = zip(*ranked, strict=True) if ranked else [()] * 5
    names = ("AP", "AP_envelope", "AP_11point", "AUC")
    return {"positives": np.array(positives, np.int64)} | dict(zip(names, map(np.array, metrics), strict=True))


def micro_average_precision(
    scores: ScoreMatrix, labels: LabelArray, *, mask: LabelArray | None = None, interpolation: str = "none"
) -> float:
    """Return the AP of the entries of all classes, ranked in one list; nan without positives.

    Unlike AP per class, this metric requires scores that are comparable between classes.
    """
    return rank_all(*check_inputs(scores, labels, mask)).average_precision(interpolation)


def mean_average_precision(ap: Num[np.ndarray, " k"], *, weights: Num[np.ndarray, " k"] | None = None) -> float:
    """Return the mean of the AP over the classes whose AP is not nan, which have a positive; nan without such a class.

    Classes have equal weights by default (macro). With the number of positives per class as `weights`, the result is
    the weighted mAP.
    """
    ap = np.asarray(ap, np.float64)
    if weights is None:
        return float(mean_defined(ap))
    defined = ~np.isnan(ap)
    weights = np.asarray(weights, np.float64)[defined]
    return float(ratio(weights @ ap[defined], weights.sum()))


def precision_recall_f1(
    predicted: LabelArray, labels: LabelArray, *, mask: LabelArray | None = None, empty: str = "skip"
) -> dict[str, float]:
    """Return precision, recall and F1: means over classes, and values for the entries of all classes together.

    For each class, TP is the number of true positives, P of predictions (`predicted` is not 0), and G of positives. The
    keys of the result are:

    * `CP`, `CR`: means over classes of TP/P and TP/G.
    * `OP`, `OR`: ΣTP/ΣP and ΣTP/ΣG, sums over classes.
    * `CF1`, `OF1`: harmonic means of CP with CR, and of OP with OR (the CF1 of nearly all published tables). They are 0
      if precision and recall are both 0, and nan if either is nan.
    * `CF1_mean`: mean over classes of 2TP/(P+G).
    * `precision_macro`, `recall_macro`, `F1_macro`: means over all K classes of TP/P, TP/G and 2TP/(P+G), where 0/0 is
      0 for every `empty` (scikit-learn's average="macro").

    The treatment of 0/0 is `empty`. With "skip", the class is left out of the mean, and an overall value is nan
    (ML-VPT). CP is then larger if some classes are never predicted. With "zero", 0/0 is 0 (scikit-learn). "one" is as
    "skip", but P is at least 1 for each class, also in ΣP (ML-GCN, ADD-GCN).
    """
    hits, claimed, actual = _counts(predicted, labels, mask)
    if empty == "one":
        claimed = np.maximum(claimed, 1)
    metrics = measure_counts(hits, claimed, actual, fill={"skip": np.nan, "zero": 0.0, "one": np.nan}[empty])
    return {name: float(value) for name, value in metrics.items()}


def top_k(
    scores: ScoreMatrix, k: int, *, minimum: float | None = None, mask: LabelArray | None = None
) -> Bool[np.ndarray, "b k"]:
    """Return whether each class is one of the k valid classes with the highest scores of its image.

    If scores are equal, the class with the lower index ranks higher. Classes with a score below `minimum` are dropped
    (ML-GCN's top-3 requires logit ≥ 0). Without `minimum` and `mask`, each image has exactly k classes (older work).
    Raises ValueError if k is below 1, or a valid score is NaN.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    scores = np.asarray(scores)
    scores, _, valid = check_inputs(scores, np.broadcast_to(np.False_, scores.shape), mask)
    images, classes = scores.shape
    k = min(k, classes)
    top = np.zeros(scores.shape, bool)
    for rows in row_blocks(images, classes):
        block = np.where(valid[rows], scores[rows], -np.inf)
        kth = np.partition(block, classes - k, axis=1)[:, classes - k, None]
        best = block >= kth
        crowded = np.flatnonzero(np.count_nonzero(best, axis=1) > k)  # equal k-th scores, which are rare
        level = block[crowded] == kth[crowded]
        vacant = k - np.count_nonzero(best[crowded] & ~level, axis=1)
        best[crowded] &= ~level | (np.cumsum(level, axis=1) <= vacant[:, None])
        top[rows] = best & valid[rows]
        if minimum is not None:
            top[rows] &= block >= minimum
    return top


def map_at_k(
    scores: ScoreMatrix, labels: LabelArray, k: int, *, mask: LabelArray | None = None, minimum: float | None = None
) -> float:
    """Return the mAP if each image returns only its k valid classes with the highest scores.

    Images do not return classes with a score below `minimum`. The AP of a class is computed over the images that return
    the class. Its positives in other images have precision 0. For k ≥ K and no `minimum`, the result is the plain mAP.
    It is nan if no class has a positive. (DR-MoE does not define mAP@k in detail.)
    """
    scores, positive, valid = check_inputs(scores, labels, mask)
    return map_of_returned(scores, positive, valid, top_k(scores, k, minimum=minimum, mask=valid))


def _counts(predicted: LabelArray, labels: LabelArray, mask: LabelArray | None) -> Ints:
    """Return i64[3,K]: the true positives, predictions and positives of each class among its valid entries."""
    predicted, positive, valid = as_flags(predicted, labels, mask)
    claimed, actual = (predicted != 0) & valid, positive & valid
    return np.array([np.count_nonzero(x, axis=0) for x in (claimed & actual, claimed, actual)])


def map_of_returned(scores: ScoreMatrix, positive: LabelArray, valid: LabelArray, returned: LabelArray) -> float:
    """Return the mAP of `map_at_k`, given `returned`, bool: the classes that each image returns, from `top_k`."""
    *_, positives = _counts(positive, positive, valid)
    gained = [
        r.positives * r.average_precision() if r.positives else 0.0 for r in rank_classes(scores, positive, returned)
    ]
    return float(mean_defined(ratio(gained, positives)))


# --------------------------------------------------------------------------------------------------- counts and means
def measure_counts(
    hits: Num[np.ndarray, "*rows k"],
    claimed: Num[np.ndarray, "*rows k"],
    actual: Num[np.ndarray, "*rows k"],
    *,
    fill: float = np.nan,
) -> dict[str, Any]:
    """Return the metrics of `precision_recall_f1` from counts per class: true positives, predictions, and positives.

    The value of 0/0 is `fill`; nan leaves the class out of means. It does not apply to macro metrics, where 0/0 is 0.
    Values have the leading axes of the counts. The last axis, K classes, is reduced.
    """
    hits, claimed, actual = map(np.asarray, (hits, claimed, actual))
    cp, cr = (mean_defined(ratio(hits, count, fill)) for count in (claimed, actual))
    op, or_ = (ratio(hits.sum(axis=-1), count.sum(axis=-1), fill) for count in (claimed, actual))
    f1 = mean_defined(ratio(2 * hits, claimed + actual, fill))
    metrics = dict(CP=cp, CR=cr, CF1=harmonic(cp, cr), CF1_mean=f1, OP=op, OR=or_, OF1=harmonic(op, or_))
    macro = dict(precision_macro=(hits, claimed), recall_macro=(hits, actual), F1_macro=(2 * hits, claimed + actual))
    return metrics | {name: mean_defined(ratio(*counts, fill=0.0)) for name, counts in macro.items()}


def ratio(numerator: ArrayLike, denominator: ArrayLike, fill: float = np.nan) -> Floats:
    """Return numerator / denominator, `fill` if the denominator is 0."""
    denominator = np.asarray(denominator)
    return np.divide(numerator, denominator, out=np.full(denominator.shape, fill), where=denominator != 0)


def mean_defined(values: ArrayLike) -> Any:
    """Return the mean over the last axis, without nan: f64[...,K] -> f64[...]; nan where all K values are nan."""
    values = np.asarray(values, np.float64)
    if values.ndim > 1:
        return np.array([mean_defined(row) for row in values])
    values = values[~np.isnan(values)]
    return values.mean() if values.size else np.float64(np.nan)


def sample_deviation(values: ArrayLike) -> float:
    """Return the sample standard deviation √(Σ(x − mean)²/(n − 1)) of n values; nan for n < 2."""
    values = np.asarray(values, np.float64)
    return float(values.std(ddof=1)) if values.size > 1 else float("nan")


def harmonic(a: ArrayLike, b: ArrayLike) -> Floats:
    """Return the elementwise harmonic mean of two nonnegative arrays; 0 where both are 0."""
    a, b = np.asarray(a), np.asarray(b)
    return np.where((a == 0) & (b == 0), 0.0, ratio(2 * a * b, a + b))
