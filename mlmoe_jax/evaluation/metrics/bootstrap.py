"""The paired bootstrap over images: exact metrics of many resamples of a split, from one sort per class.

A resample draws N of the N images with replacement. It is represented by the number of times that it has each image.
The metrics of a resample then are weighted metrics of the images, and each class is ranked only once.

Shape letters: N images, K classes, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix

from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.evaluation.metrics.multilabel import mean_defined, measure_counts, ratio, top_k
from mlmoe_jax.models.attributes import assign
from mlmoe_jax.runtime.array_types import Floats

RESAMPLES_AT_ONCE = 100  # resamples at a time: their weights take 16 MB for 40,000 images


def draw(images: int, resamples: int, seed: int) -> Iterator[NDArray[np.float32]]:
    """Yield resamples as f32[N,R'], R' ≤ RESAMPLES_AT_ONCE: how many times each resample contains each image.

    N is `images`. In total, `resamples` resamples are yielded. Equal seeds give equal resamples, so the metrics of two
    runs can be compared resample by resample.
    """
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, RESAMPLES_AT_ONCE):
        samples = (generator.integers(images, size=images) for _ in range(min(RESAMPLES_AT_ONCE, resamples - start)))
        yield np.stack([np.bincount(rows, minlength=images) for rows in samples], axis=1).astype(np.float32)


class WeightedMetrics:
    """A function from integer weights of the images of a split to weighted metrics.

    The metrics are `mAP`, `mAP_envelope`, `precision@1`, and the metrics of `multilabel.measure_counts` with the suffix
    `@THRESHOLD`. For weights of 1, they equal the metrics of `metric_groups.measure_entries`. Scores are f[N,K], labels
    [N,K] (positive if equal to 1), and the mask [N,K] is 0 for entries to ignore. `models.attributes.assign` predicts.
    """

    def __init__(
        self,
        scores: ArrayLike,
        labels: ArrayLike,
        mask: ArrayLike,
        threshold: float,
        attributes: Sequence[Attribute] = (),
    ):
        scores, valid = np.asarray(scores, np.float64), np.asarray(mask) != 0
        positive, predicted = (np.asarray(labels) == 1) & valid, assign(scores, threshold, attributes) & valid
        self.suffix = f"@{threshold:g}"
        self.ranked = [_Ranked.of(*columns) for columns in zip(scores.T, positive.T, valid.T, strict=True)]
        # Matmuls with counts are exact in float32 up to 16 million.
        self.counted = [x.astype(np.float32) for x in (positive & predicted, predicted, positive)]
        top = top_k(np.where(valid, scores, -np.inf), 1) & positive
        self.top, self.any = (x.any(axis=1).astype(np.float32) for x in (top, valid))

    def __call__(self, weights: NDArray[np.float32]) -> tuple[dict[str, Floats], Floats]:
        """Return metric name -> f64[R], and the average precision f64[R,K], for the weights f32[N,R] of R resamples.

        Undefined values are nan. In each resample, means over classes leave out a class whose value is undefined: its
        AP or recall if it has no positive, its precision if it has no prediction.
        """
        curves = [ranked.average_precision(weights) for ranked in self.ranked]
        plain, envelope = (np.stack(kind, axis=1) for kind in zip(*curves, strict=True))
        values = {
            "mAP": mean_defined(plain),
            "mAP_envelope": mean_defined(envelope),
            "precision@1": ratio(self.top @ weights, self.any @ weights),
        }
        hits, claimed, actual = ((weights.T @ counted).astype(np.float64) for counted in self.counted)
        metrics = measure_counts(hits, claimed, actual)
        return values | {f"{name}{self.suffix}": value for name, value in metrics.items()}, plain


def percentile_interval(values: Floats, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Return the lower and the upper end, f64[…], of the percentile interval over R resamples, f64[R,…].

    NaN values, such as the AP of a class without a positive in a resample, are ignored. The ends are nan where all R
    values are nan. `confidence` is the coverage of the interval. Source: Efron and Tibshirani, sec. 13.3.
    """
    undefined = np.isnan(values).all(axis=0)
    tails = 100 * np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    low, high = np.nanpercentile(np.where(undefined, 0, values), tails, axis=0)
    return np.where(undefined, np.nan, low), np.where(undefined, np.nan, high)


def standard_interval(value: float, values: Floats) -> tuple[float, float]:
    """Return the lower and the upper end of a 95 % interval around a metric, `value`, with values f64[R] in resamples.

    The interval is `value` ± 1.96 sample standard deviations of `values`, clipped to [0, 1]. It is (nan, nan) if
    `value` is nan, or if fewer than two of `values` are not nan. Percentiles are unsuitable for one run: a resample
    contains copies of images, the scores of copies tie, and so the average precision of resamples is biased upward.
    Source: Efron and Tibshirani, sec. 13.2.
    """
    defined = values[~np.isnan(values)]
    if defined.size < 2 or np.isnan(value):
        return np.nan, np.nan
    reach = 1.96 * float(np.std(defined, ddof=1))
    return max(0.0, value - reach), min(1.0, value + reach)


@dataclass(frozen=True)
class _Ranked:
    """The valid images of one class by decreasing score, divided into J segments.

    A segment ends after each score that a positive has, so images with equal scores are in one segment. Both attributes
    are sparse f32[J,N]. `images` is 1 for the images of a segment, and `positives` for its positive images. Both are
    None for a class without positives.
    """

    images: csr_matrix | None
    positives: csr_matrix | None

    @classmethod
    def of(cls, scores: Floats, positive: NDArray[np.bool_], valid: NDArray[np.bool_]) -> _Ranked:
        """Rank the valid images of one class by score.

        Args:
          scores: f64[N].
          positive: bool[N], whether an image is a valid positive.
          valid: bool[N], whether an image is ranked.
        """
        rows = np.flatnonzero(valid)
        rows = rows[np.argsort(-scores[rows])]
        ranks = np.flatnonzero(positive[rows])
        if not ranks.size:
            return cls(None, None)
        # Equal scores are one step, so a segment ends before a lower score, as in multilabel.average_precision.
        falls = np.append(np.flatnonzero(np.diff(scores[rows])) + 1, rows.size)
        ends = np.unique(falls[np.searchsorted(falls, ranks, side="right")])

        def segments(members: NDArray, ends: NDArray) -> csr_matrix:
            ones = np.ones(ends[-1], np.float32)
            shape = (ends.size, scores.size)
            return csr_matrix((ones, members[: ends[-1]].astype(np.int32), np.append(0, ends)), shape=shape)

        return cls(segments(rows, ends), segments(rows[ranks], np.searchsorted(ranks, ends)))

    def average_precision(self, weights: NDArray[np.float32]) -> tuple[Floats, Floats]:
        """Return the plain AP and the envelope AP, f64[R] each, for weights f32[N,R]; nan without positives."""
        if self.images is None:
            undefined = np.full(weights.shape[1], np.nan)
            return undefined, undefined
        gained = (self.positives @ weights).astype(np.float64)  # [J,R]
        hits, ranks = np.cumsum(gained, axis=0), np.cumsum(self.images @ weights, axis=0, dtype=np.float64)
        total = hits[-1].copy()
        precision = np.divide(hits, np.maximum(ranks, 1, out=ranks), out=hits)
        # Within a segment precision only decreases, so its maximum at higher recalls is at the end of a segment.
        best = np.maximum.accumulate(precision[::-1])[::-1]
        return tuple(ratio(np.einsum("jr,jr->r", gained, curve), total) for curve in (precision, best))
