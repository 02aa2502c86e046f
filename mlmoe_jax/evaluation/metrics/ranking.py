"""Rank the positives of a class among its negatives: one sort for all forms of AP and for AUC.

Shape letters: B images, K classes, P positives of one class.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.runtime.array_types import Bools, Ints, Reals

INTERPOLATIONS = ("none", "envelope", "11point")
_ENTRIES = 1 << 22  # processed at a time, to limit additional memory
_CLASSES = 8  # columns of a row-major matrix copied at a time: one cache line of float64


@dataclass(frozen=True)
class Ranking:
    """The positives of one class, ranked among its negatives. Arrays have one entry per positive, by increasing score.

    Attributes:
      hits: i64[P], number of positives with this score or a higher one.
      above: i64[P], number of negatives with a higher score.
      level: i64[P], number of negatives with an equal score.
    """

    hits: Ints
    above: Ints
    level: Ints
    negatives: int

    @property
    def positives(self) -> int:
        return self.hits.size

    def average_precision(self, interpolation: str = "none") -> float:
        """Return the AP for an `interpolation` of `multilabel.average_precision`; nan without positives."""
        if interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation must be 'none', 'envelope' or '11point', not {interpolation!r}")
        if not self.positives:
            return float("nan")
        precision = self.hits / (self.hits + self.above + self.level)
        if interpolation == "none":
            return float(precision.mean())
        highest = np.maximum.accumulate(precision)  # at this or any higher recall, that is, any lower score
        if interpolation == "envelope":
            return float(highest.mean())
        # Integers: a recall of 3/10 in floating point may fall short of 0.3.
        last = [np.count_nonzero(10 * self.hits >= level * self.positives) - 1 for level in range(11)]
        return float(highest[last].mean())

    def roc_auc(self) -> float:
        """Return the area under the ROC curve, as in `multilabel.roc_auc`; nan without positives or negatives."""
        if not self.positives or not self.negatives:
            return float("nan")
        misordered = 2 * int(self.above.sum()) + int(self.level.sum())
        pairs = 2 * self.positives * self.negatives
        return (pairs - misordered) / pairs


def rank(positives: Reals, negatives: Iterable[Reals]) -> Ranking:
    """Return the ranking of one class. Scores: `positives` f[P], and `negatives` in one or several arrays f[n]."""
    positives = np.sort(positives)
    hits = positives.size - np.searchsorted(positives, positives)
    above, level, total = np.zeros_like(hits), np.zeros_like(hits), 0
    for part in negatives:
        part = np.sort(part)
        lower = np.searchsorted(part, positives)
        tied = np.flatnonzero(part.take(lower, mode="clip") == positives) if part.size else lower[:0]
        upper = lower.copy()
        upper[tied] = np.searchsorted(part, positives[tied], "right")
        above += part.size - upper
        level += upper - lower
        total += part.size
    return Ranking(hits, above, level, total)


def rank_classes(scores: Reals, positive: Bools, valid: Bools) -> Iterator[Ranking]:
    """Yield the ranking of each class over its valid entries. The arguments are results of `check_inputs`."""
    for first in range(0, scores.shape[1], _CLASSES):
        columns = (np.ascontiguousarray(x[:, first : first + _CLASSES].T) for x in (scores, positive, valid))
        for s, y, v in zip(*columns, strict=True):
            yield rank(s[y & v], [s[~y & v]])


def rank_all(scores: Reals, positive: Bools, valid: Bools) -> Ranking:
    """Return the ranking of the valid entries of all classes in one list. Arguments are results of `check_inputs`."""
    positives = scores[positive & valid]
    # Large parts, because all positives are searched in each.
    blocks = row_blocks(*scores.shape, entries=max(4 * _ENTRIES, positives.size))
    return rank(positives, (scores[rows][valid[rows] & ~positive[rows]] for rows in blocks))


def check_inputs(scores: ArrayLike, labels: ArrayLike, mask: ArrayLike | None) -> tuple[Reals, Bools, Bools]:
    """Return scores f32 or f64, positive labels (equal to 1) and valid entries (mask not 0), all [B,K].

    Without a mask, all entries are valid. Arrays are not copied if possible. Raises ValueError if the shapes are wrong
    or differ, or a valid score is NaN.
    """
    scores, positive, valid = as_flags(scores, labels, mask)
    if scores.dtype not in (np.float32, np.float64):
        scores = scores.astype(np.float64)
    if (np.isnan(scores) & valid).any():
        raise ValueError("a score is NaN: the model has diverged, or a padded entry is not masked")
    return scores, positive, valid


def as_flags(values: ArrayLike, labels: ArrayLike, mask: ArrayLike | None) -> tuple[NDArray, Bools, Bools]:
    """Return (values, positive, valid), all [B,K]: `positive` is labels == 1, and `valid` is mask != 0.

    If `mask` is None, all entries are valid. Raises ValueError if the shapes are not [B,K] or differ.
    """
    values, labels = np.asarray(values), np.asarray(labels)
    positive = labels if labels.dtype == bool else labels == 1
    valid = np.broadcast_to(np.True_, labels.shape) if mask is None else np.asarray(mask)
    if labels.ndim != 2 or not values.shape == labels.shape == valid.shape:
        raise ValueError(f"scores, labels and mask must be [B,K], not {values.shape}, {labels.shape} and {valid.shape}")
    return values, positive, valid if valid.dtype == bool else valid != 0


def row_blocks(images: int, classes: int, *, entries: int | None = None) -> Iterator[slice]:
    """Return slices that together cover the B rows of a matrix [B,K]. A block has about `entries` entries."""
    step = max(1, (entries or _ENTRIES) // max(1, classes))
    return (slice(start, start + step) for start in range(0, images, step))


def label_blocks(images: int, classes: int) -> Iterator[slice]:
    """Return slices that together cover the K columns of a matrix [B,K], as `row_blocks` its rows."""
    return row_blocks(classes, images)
