"""The paired bootstrap over images: the metrics of many resamples of a split, exact, from one sort of each class.

A resample draws N of the N images with replacement. It is kept as how often each image was drawn, so that metrics of
resamples are weighted metrics of the images, and a class is ranked only once. Shape letters: N images, K classes,
R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix

from mlmoe_jax.evaluation.metrics.multilabel import top_k
from mlmoe_jax.evaluation.metrics.rates import Floats, mean_defined, precision_recall_f1_of, ratio

CHUNK = 100  # resamples at a time: their weights of 40,000 images take 16 MB


def draw(images: int, resamples: int, seed: int) -> Iterator[NDArray[np.float32]]:
    """Draw resamples; yield how often each image is in them, f32[N,R'] with R' ≤ CHUNK, `resamples` in all.

    Both runs of a comparison get the same resamples, which is what makes it paired.
    """
    generator = np.random.default_rng(seed)
    for first in range(0, resamples, CHUNK):
        drawn = (generator.integers(images, size=images) for _ in range(min(CHUNK, resamples - first)))
        yield np.stack([np.bincount(rows, minlength=images) for rows in drawn], axis=1).astype(np.float32)


class WeightedMetrics:
    """The metrics of `groups.evaluate_scores` at one threshold, for images that count several times or not at all.

    Args:
      scores: f[N,K], probabilities.
      labels: [N,K], positive where they equal 1.
      mask: [N,K], 0 where an entry must not count.
      threshold: from which on a class is predicted.
    """

    def __init__(self, scores: ArrayLike, labels: ArrayLike, mask: ArrayLike, threshold: float):
        scores, valid = np.asarray(scores, np.float64), np.asarray(mask) != 0
        positive, predicted = (np.asarray(labels) == 1) & valid, (scores >= threshold) & valid
        self.suffix = f"@{threshold:g}"
        self.ranked = [_Ranked.of(*columns) for columns in zip(scores.T, positive.T, valid.T, strict=True)]
        # Products with counts are exact in float32, whose integers reach to 16 million.
        self.counted = [x.astype(np.float32) for x in (positive & predicted, predicted, positive)]
        top = top_k(np.where(valid, scores, -np.inf), 1) & positive
        self.top, self.any = (x.any(axis=1).astype(np.float32) for x in (top, valid))

    def __call__(self, weights: NDArray[np.float32]) -> tuple[dict[str, Floats], Floats]:
        """Return (metrics by name, f64[R] each; average precision f64[R,K]) for weights f32[N,R]; nan where undefined.

        Sums over the classes leave out those that a resample has no positive of, or no prediction.
        """
        curves = [ranked.average_precision(weights) for ranked in self.ranked]
        plain, envelope = (np.stack(kind, axis=1) for kind in zip(*curves, strict=True))
        values = {
            "mAP": mean_defined(plain),
            "mAP_envelope": mean_defined(envelope),
            "precision@1": ratio(self.top @ weights, self.any @ weights),
        }
        hits, claimed, actual = ((weights.T @ counted).astype(np.float64) for counted in self.counted)
        figures = precision_recall_f1_of(hits, claimed, actual)
        return values | {f"{name}{self.suffix}": value for name, value in figures.items()}, plain


def percentile_interval(values: Floats, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Return the ends of the percentile interval of values f64[R,…] over resamples, nan where none is defined.

    Resamples whose value is nan, such as the AP of a class that they have no positive of, are left out.
    Source: B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3.
    """
    undefined = np.isnan(values).all(axis=0)
    tails = 100 * np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    low, high = np.nanpercentile(np.where(undefined, 0, values), tails, axis=0)
    return np.where(undefined, np.nan, low), np.where(undefined, np.nan, high)


@dataclass(frozen=True)
class _Ranked:
    """A class with its images by falling score, cut behind every score that a positive has: J segments.

    seen, found: [J,N], which images, and which positives, lie in each segment. None for a class without positives.
    """

    seen: csr_matrix | None
    found: csr_matrix | None

    @classmethod
    def of(cls, scores: Floats, positive: NDArray[np.bool_], valid: NDArray[np.bool_]) -> _Ranked:
        """Rank the valid ones of the images by scores f64[N]."""
        rows = np.flatnonzero(valid)
        rows = rows[np.argsort(-scores[rows])]
        ranks = np.flatnonzero(positive[rows])
        if not ranks.size:
            return cls(None, None)
        # Equal scores enter together: a segment ends where the score falls, as in multilabel.average_precision.
        falls = np.append(np.flatnonzero(np.diff(scores[rows])) + 1, rows.size)
        ends = np.unique(falls[np.searchsorted(falls, ranks, side="right")])

        def segments(images: NDArray, ends: NDArray) -> csr_matrix:
            ones = np.ones(ends[-1], np.float32)
            shape = (ends.size, scores.size)
            return csr_matrix((ones, images[: ends[-1]].astype(np.int32), np.append(0, ends)), shape=shape)

        return cls(segments(rows, ends), segments(rows[ranks], np.searchsorted(ranks, ends)))

    def average_precision(self, weights: NDArray[np.float32]) -> tuple[Floats, Floats]:
        """Return the AP without and with the envelope, f64[R] each, nan where all positives have weight 0."""
        if self.seen is None:
            undefined = np.full(weights.shape[1], np.nan)
            return undefined, undefined
        gained = (self.found @ weights).astype(np.float64)  # [J,R]
        found, seen = np.cumsum(gained, axis=0), np.cumsum(self.seen @ weights, axis=0, dtype=np.float64)
        total = found[-1].copy()
        precision = np.divide(found, np.maximum(seen, 1, out=seen), out=found)
        # Between two segments precision only falls, so that the largest at higher recalls is at the end of a segment.
        best = np.maximum.accumulate(precision[::-1])[::-1]
        return tuple(ratio(np.einsum("jr,jr->r", gained, curve), total) for curve in (precision, best))
