"""Multi-label metrics over a whole split: exact, in float64, on the host.

Shape letters: B images, K classes. Everywhere: `scores` f[B,K] are any real numbers, larger = more likely;
`labels` [B,K] are positive where they equal 1 (0, −1 and False are negative); `mask` [B,K] is 0 where an entry must not
count (padding, unknown or difficult labels), None counts all. Results are fractions in [0, 1], and nan where undefined.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.evaluation.metrics.ranking import INTERPOLATIONS, checked, flags, rank_all, rank_classes, row_blocks
from mlmoe_jax.evaluation.metrics.rates import mean_defined, precision_recall_f1_of, ratio

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def average_precision(
    scores: ArrayLike, labels: ArrayLike, *, mask: ArrayLike | None = None, interpolation: str = "none"
) -> Floats:
    """Average precision of every class.

    Entries with equal scores are one step of the precision-recall curve: they enter together, so no order among them
    matters. (Published evaluators leave that order to the sort; without ties all agree.)

    Args:
      scores: f[B,K].
      labels: [B,K].
      mask: [B,K] or None.
      interpolation: "none", mean of the precision at every positive (scikit-learn, ML-GCN, ADD-GCN, ASL, ML-Decoder);
        "envelope", the same of the largest precision at this or any higher recall (VOC 2010+, SSGRL, Q2L, ML-VPT),
        never below "none";
        "11point", mean of that largest precision at recall 0, 0.1 … 1 (VOC 2007; recalls compared exactly).

    Returns:
      f64[K], nan where a class has no positive.

    Raises:
      ValueError: unknown interpolation, wrong shapes, or a NaN score in a valid entry.
    """
    return np.array([r.average_precision(interpolation) for r in rank_classes(*checked(scores, labels, mask))])


def roc_auc(scores: ArrayLike, labels: ArrayLike, *, mask: ArrayLike | None = None) -> Floats:
    """Area under the ROC curve of every class: the chance that a positive scores above a negative, ties counting half.

    Returns f64[K], nan where a class has no positive or no negative. Arguments as for `average_precision`.
    """
    return np.array([r.roc_auc() for r in rank_classes(*checked(scores, labels, mask))])


def per_class(scores: ArrayLike, labels: ArrayLike, *, mask: ArrayLike | None = None) -> dict[str, NDArray]:
    """Everything that the ranking of a class says, from one sort of each class.

    Returns:
      positives i64[K]; AP, AP_envelope, AP_11point, AUC f64[K], nan where undefined.
    """
    ranked = [
        (r.positives, *(r.average_precision(kind) for kind in INTERPOLATIONS), r.roc_auc())
        for r in rank_classes(*checked(scores, labels, mask))
    ]
    positives, *figures = zip(*ranked, strict=True) if ranked else [()] * 5
    names = ("AP", "AP_envelope", "AP_11point", "AUC")
    return {"positives": np.array(positives, np.int64)} | dict(zip(names, map(np.array, figures), strict=True))


def micro_average_precision(
    scores: ArrayLike, labels: ArrayLike, *, mask: ArrayLike | None = None, interpolation: str = "none"
) -> float:
    """AP of all entries ranked in one list, whatever their class; nan without positives.

    It asks that scores compare across classes, unlike every other AP here. Arguments as for `average_precision`.
    """
    return rank_all(*checked(scores, labels, mask)).average_precision(interpolation)


def mean_average_precision(ap: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Mean over the classes that have a positive (ap f64[K] is not nan); nan where there is none.

    weights: f[K] or None, all equal (macro). The number of positives of every class gives the weighted mAP.
    """
    ap = np.asarray(ap, np.float64)
    if weights is None:
        return float(mean_defined(ap))
    defined = ~np.isnan(ap)
    weights = np.asarray(weights, np.float64)[defined]
    return float(ratio(weights @ ap[defined], weights.sum()))


def precision_recall_f1(
    predicted: ArrayLike, labels: ArrayLike, *, mask: ArrayLike | None = None, empty: str = "skip"
) -> dict[str, float]:
    """Precision, recall and F1, per class and overall, of predicted [B,K] (true = predicted).

    With TP, P (predicted) and G (positive) counts of a class:
    CP, CR = means over classes of TP/P and TP/G; OP, OR = ΣTP/ΣP and ΣTP/ΣG;
    CF1, OF1 = harmonic means of CP with CR and of OP with OR (the CF1 of nearly all published tables);
    CF1_mean = mean over classes of 2TP/(P+G).

    Args:
      predicted: [B,K].
      labels: [B,K].
      mask: [B,K] or None.
      empty: what 0/0 counts: "skip", a class is left out of the mean, and an overall value is nan (ML-VPT); "zero", 0
        (scikit-learn); "one", as "skip" but P is at least 1 for every class, also inside ΣP (ML-GCN, ADD-GCN).

    Returns:
      CP CR CF1 CF1_mean OP OR OF1. F1 is 0 where precision and recall both are, nan where either is.
    """
    if empty not in ("skip", "zero", "one"):
        raise ValueError(f"empty must be 'skip', 'zero' or 'one', not {empty!r}")
    hits, claimed, actual = _counts(predicted, labels, mask)
    if empty == "one":
        claimed = np.maximum(claimed, 1)
    figures = precision_recall_f1_of(hits, claimed, actual, fill=0.0 if empty == "zero" else np.nan)
    return {name: float(value) for name, value in figures.items()}


def top_k(scores: ArrayLike, k: int, *, minimum: float | None = None, mask: ArrayLike | None = None) -> Bools:
    """The k highest classes of every image, as bool[B,K]; all of them where k ≥ K.

    Of equal scores the lower class index wins. Classes whose mask [B,K] is 0 are passed over. Without `minimum` an
    image gets exactly k (forced; older work); with it a class is also dropped where its score is below (ML-GCN's top-3
    asks for logit ≥ 0).

    Raises ValueError for k below 1, or a NaN score where the mask is not 0.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    scores = np.asarray(scores)
    scores, _, valid = checked(scores, np.broadcast_to(np.False_, scores.shape), mask)
    images, classes = scores.shape
    k = min(k, classes)
    chosen = np.zeros(scores.shape, bool)
    for rows in row_blocks(images, classes):
        block = np.where(valid[rows], scores[rows], -np.inf)
        kth = np.partition(block, classes - k, axis=1)[:, classes - k, None]
        best = block >= kth
        crowded = np.flatnonzero(np.count_nonzero(best, axis=1) > k)  # equal scores at the cut, which are rare
        level = block[crowded] == kth[crowded]
        room = k - np.count_nonzero(best[crowded] & ~level, axis=1)
        best[crowded] &= ~level | (np.cumsum(level, axis=1) <= room[:, None])
        chosen[rows] = best & valid[rows]
        if minimum is not None:
            chosen[rows] &= block >= minimum
    return chosen


def map_at_k(
    scores: ArrayLike, labels: ArrayLike, k: int, *, mask: ArrayLike | None = None, minimum: float | None = None
) -> float:
    """mAP when every image only returns its k highest valid classes (DR-MoE names it without details).

    A class ranks the images that returned it; its positives in other images count with precision 0. With `minimum` an
    image also keeps back what scores below it. Equal to the plain mAP where k ≥ K and there is no minimum. Never above
    1; nan where no class has a positive.
    """
    scores, positive, valid = checked(scores, labels, mask)
    return map_of_returned(scores, positive, valid, top_k(scores, k, minimum=minimum, mask=valid))


def _counts(predicted: ArrayLike, labels: ArrayLike, mask: ArrayLike | None) -> tuple[Ints, Ints, Ints]:
    """Hits, predictions and positives of every class among its valid entries, i64[K] each."""
    predicted = np.asarray(predicted)
    positive, valid = flags(labels, mask)
    if predicted.shape != positive.shape:
        raise ValueError(f"predicted and labels must both be [B,K], not {predicted.shape} and {positive.shape}")
    totals = np.zeros((3, positive.shape[1]), np.int64)
    for rows in row_blocks(*positive.shape):
        claimed, actual = (predicted[rows] != 0) & valid[rows], positive[rows] & valid[rows]
        totals += [np.count_nonzero(x, axis=0) for x in (claimed & actual, claimed, actual)]
    return tuple(totals)


def map_of_returned(scores: Floats, positive: Bools, valid: Bools, returned: Bools) -> float:
    """Return the mAP of rankings that hold the `returned` entries only, all [B,K]; see `map_at_k`."""
    positives = _counts(positive, positive, valid)[2]
    gained = [
        r.positives * r.average_precision() if r.positives else 0.0 for r in rank_classes(scores, positive, returned)
    ]
    return float(mean_defined(ratio(gained, positives)))
