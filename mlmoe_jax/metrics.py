"""Multi-label metrics over a whole split: exact, in float64, on the host.

Shape letters: B images, K classes. Everywhere: `scores` f[B,K] are any real numbers, larger = more likely;
`labels` [B,K] are positive where they equal 1 (0, −1 and False are negative); `mask` [B,K] is 0 where an entry must not
count (padding, unknown or difficult labels), None counts all. Results are fractions in [0, 1], and nan where undefined.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


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
    if interpolation not in ("none", "envelope", "11point"):
        raise ValueError(f"interpolation must be 'none', 'envelope' or '11point', not {interpolation!r}")
    hit, found, precision = _curve(*_checked(scores, labels, mask))
    positives = hit.sum(axis=1)
    if interpolation == "11point":
        # Integers: a recall of 3/10 in floating point may fall short of 0.3.
        reached = (10 * found >= level * positives[:, None] for level in range(11))
        total = sum(np.where(at, precision, 0.0).max(axis=1, initial=0.0) for at in reached)
        return _ratio(total, np.where(positives > 0, 11, 0), np.nan)
    if interpolation == "envelope":
        precision = _accumulate_from_right(np.maximum, precision)
    return _ratio(np.where(hit, precision, 0.0).sum(axis=1), positives, np.nan)


def mean_average_precision(ap: ArrayLike) -> float:
    """Mean over the classes that have a positive (ap f64[K] is not nan); nan where there is none."""
    return _mean(np.asarray(ap, np.float64))


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
    predicted, positive, valid = _checked(predicted, labels, mask)
    predicted = (predicted != 0) & valid
    hits, claimed, actual = ((entry & valid).sum(axis=0) for entry in (predicted & positive, predicted, positive))
    if empty == "one":
        claimed = np.maximum(claimed, 1)
    fill = 0.0 if empty == "zero" else np.nan
    cp, cr = _mean(_ratio(hits, claimed, fill)), _mean(_ratio(hits, actual, fill))
    op, or_ = (float(_ratio(hits.sum(), count.sum(), fill)) for count in (claimed, actual))
    f1 = _mean(_ratio(2 * hits, claimed + actual, fill))
    return dict(CP=cp, CR=cr, CF1=_harmonic(cp, cr), CF1_mean=f1, OP=op, OR=or_, OF1=_harmonic(op, or_))


def top_k(scores: ArrayLike, k: int, *, minimum: float | None = None) -> Bools:
    """The k highest classes of every image, as bool[B,K]; all of them where k ≥ K.

    Of equal scores the lower class index wins. With `minimum` a class is also dropped where its score is below it
    (ML-GCN's top-3 asks for logit ≥ 0; older work takes exactly three).
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    scores = np.asarray(scores, np.float64)
    chosen = np.zeros(scores.shape, bool)
    order = np.argsort(-scores, axis=1, kind="stable")
    np.put_along_axis(chosen, order[:, :k], True, axis=1)
    return chosen if minimum is None else chosen & (scores >= minimum)


def map_at_k(scores: ArrayLike, labels: ArrayLike, k: int, *, mask: ArrayLike | None = None) -> float:
    """mAP when every image only returns its k highest valid classes (DR-MoE names it without details).

    A class ranks the images that returned it; its positives in other images count with precision 0.
    Equal to the plain mAP where k ≥ K. Never above 1; nan where no class has a positive.
    """
    scores, positive, valid = _checked(scores, labels, mask)
    returned = top_k(np.where(valid, scores, -np.inf), k) & valid
    share = _ratio((positive & returned).sum(axis=0), (positive & valid).sum(axis=0), np.nan)
    ap = average_precision(scores, positive, mask=returned)
    return _mean(np.where(share > 0, ap * share, share))


def evaluate_scores(
    scores: ArrayLike,
    labels: ArrayLike,
    mask: ArrayLike | None,
    thresholds: Mapping[str, float | ArrayLike],
) -> dict[str, float]:
    """Every reported number of a split, each under a name that says its definition.

    Args:
      scores: f[B,K], probabilities where the thresholds are.
      labels: [B,K].
      mask: [B,K] or None.
      thresholds: name -> a number or f64[K]; a class is predicted where score ≥ threshold. See
        `thresholds.reported`, which marks those that look at the evaluated split itself as transductive.

    Returns:
      mAP (plain) and mAP_envelope; precision@1, the share of images, among those with a valid entry, whose highest
      valid class is positive (an image without positives is a miss); and for every threshold CP@name … OF1@name of
      `precision_recall_f1` with empty="skip".
    """
    scores, positive, valid = _checked(scores, labels, mask)
    top = top_k(np.where(valid, scores, -np.inf), 1) & valid & positive
    report = {
        "mAP": mean_average_precision(average_precision(scores, positive, mask=valid)),
        "mAP_envelope": mean_average_precision(
            average_precision(scores, positive, mask=valid, interpolation="envelope")
        ),
        "precision@1": float(_ratio(top.sum(), valid.any(axis=1).sum(), np.nan)),
    }
    for name, threshold in thresholds.items():
        values = precision_recall_f1(scores >= np.asarray(threshold, np.float64), positive, mask=valid)
        report |= {f"{metric}@{name}": value for metric, value in values.items()}
    return report


def _checked(scores: ArrayLike, labels: ArrayLike, mask: ArrayLike | None) -> tuple[Floats, Bools, Bools]:
    """(scores f64[B,K], positive bool[B,K], valid bool[B,K])."""
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels)
    valid = np.ones(scores.shape, bool) if mask is None else np.asarray(mask) != 0
    if not (scores.ndim == 2 and scores.shape == labels.shape == valid.shape):
        raise ValueError(f"scores, labels and mask must all be [B,K], not {scores.shape} {labels.shape} {valid.shape}")
    if np.isnan(scores[valid]).any():
        raise ValueError("a score is NaN: the model has diverged, or a padded entry is not masked")
    return scores, labels == 1, valid


def _curve(scores: Floats, positive: Bools, valid: Bools) -> tuple[Bools, NDArray[np.int64], Floats]:
    """Rank every class by descending score.

    Returns:
      hit bool[K,B], whether the entry at this rank is a valid positive; found i64[K,B] and precision f64[K,B],
      positives and precision among all entries that score at least as high as this one.
    """
    # Invalid entries go to the end, where they count in neither sum.
    scores = np.where(valid, scores, -np.inf).T
    order = np.argsort(-scores, axis=1)
    scores, hit, counted = (np.take_along_axis(x, order, axis=1) for x in (scores, (positive & valid).T, valid.T))
    ranks = np.arange(scores.shape[1])
    ends = np.ones(scores.shape, bool)
    ends[:, :-1] = scores[:, 1:] != scores[:, :-1]
    end = _accumulate_from_right(np.minimum, np.where(ends, ranks, ranks.size))
    found, seen = (np.take_along_axis(np.cumsum(x, axis=1), end, axis=1) for x in (hit, counted))
    return hit, found, found / np.maximum(seen, 1)


def _accumulate_from_right(operation: np.ufunc, x: NDArray) -> NDArray:
    return operation.accumulate(x[:, ::-1], axis=1)[:, ::-1]


def _ratio(numerator: ArrayLike, denominator: ArrayLike, fill: float) -> Floats:
    """numerator / denominator, `fill` where the denominator is 0."""
    denominator = np.asarray(denominator)
    return np.divide(numerator, denominator, out=np.full(denominator.shape, fill), where=denominator != 0)


def _mean(values: Floats) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")


def _harmonic(a: float, b: float) -> float:
    return 0.0 if a == b == 0 else 2 * a * b / (a + b)
