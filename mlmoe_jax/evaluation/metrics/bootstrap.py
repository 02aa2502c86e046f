"""The paired bootstrap over images: exact metrics of many resamples of a split, from one sort per class.

A resample draws N of the N images with replacement. It is represented by the number of times that it has each image.
The metrics of a resample then are weighted metrics of the images, and each class is ranked only once.

Shape letters: N images, K classes, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix

from mlmoe_jax.evaluation.metrics.multilabel import mean_defined, measure_counts, ratio, top_k
from mlmoe_jax.runtime.array_types import Floats

RESAMPLES_AT_ONCE = 100  # resamples at a time: their weights take 16 MB for 40,000 images


def draw(images: int, resamples: int, seed: int) -> Iterator[NDArray[np.float32]]:
    """Draw resamples; yield the number of times that they have each image, f32[N,R'] with R' ≤ RESAMPLES_AT_ONCE.

    A comparison is paired because both runs use the same resamples.
    """
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, RESAMPLES_AT_ONCE):
        samples = (generator.integers(images, size=images) for _ in range(min(RESAMPLES_AT_ONCE, resamples - start)))
        yield np.stack([np.bincount(rows, minlength=images) for rows in samples], axis=1).astype(np.float32)


class WeightedMetrics:
    """The metrics of `metric_groups.measure_entries` at one threshold, for images with integer weights."""

    def __init__(self, scores: ArrayLike, labels: ArrayLike, mask: ArrayLike, threshold: float):
        scores, valid = np.asarray(scores, np.float64), np.asarray(mask) != 0
        positive, predicted = (np.asarray(labels) == 1) & valid, (scores >= threshold) & valid
        self.suffix = f"@{threshold:g}"
        self.ranked = [_Ranked.of(*columns) for columns in zip(scores.T, positive.T, valid.T, strict=True)]
        # Matmuls with counts are exact in float32 up to 16 million.
        self.counted = [x.astype(np.float32) for x in (positive & predicted, predicted, positive)]
        top = top_k(np.where(valid, scores, -np.inf), 1) & positive
        self.top, self.any = (x.any(axis=1).astype(np.float32) for x in (top, valid))

    def __call__(self, weights: NDArray[np.float32]) -> tuple[dict[str, Floats], Floats]:
        """Return (metrics by name, f64[R] each; average precision f64[R,K]) for weights f32[N,R]; nan if undefined.

        Means over classes leave out classes without a positive, or without a prediction, in a resample.
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
    """Return the ends of the percentile interval of values f64[R,…] over resamples, nan if all are nan.

    Values that are nan, such as the AP of a class without a positive in a resample, are left out.
    Source: Efron and Tibshirani, sec. 13.3.
    """
    undefined = np.isnan(values).all(axis=0)
    tails = 100 * np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    low, high = np.nanpercentile(np.where(undefined, 0, values), tails, axis=0)
    return np.where(undefined, np.nan, low), np.where(undefined, np.nan, high)


def standard_interval(value: float, values: Floats) -> tuple[float, float]:
    """Return the ends of the 95 % interval around the metric `value`, from its values f64[R] over resamples.

    It is `value` ± 1.96 standard deviations, within 0 … 1; nan if `value` is nan or fewer than two resamples have one.
    Percentiles are unsuitable for one run: a resample has copies of an image, which tie, so the average precision of
    resamples is biased upward. Source: Efron and Tibshirani, sec. 13.2.
    """
    defined = values[~np.isnan(values)]
    if defined.size < 2 or np.isnan(value):
        return np.nan, np.nan
    reach = 1.96 * float(np.std(defined, ddof=1))
    return max(0.0, value - reach), min(1.0, value + reach)


@dataclass(frozen=True)
class _Ranked:
    """A class with its images by decreasing score, in J segments that each end at a distinct score of a positive.

    images, positives: [J,N], the images and the positives of each segment. None for a class without positives.
    """

    images: csr_matrix | None
    positives: csr_matrix | None

    @classmethod
    def of(cls, scores: Floats, positive: NDArray[np.bool_], valid: NDArray[np.bool_]) -> _Ranked:
        """Rank the valid images by scores f64[N]."""
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
        """Return the AP without and with the envelope, f64[R] each."""
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
