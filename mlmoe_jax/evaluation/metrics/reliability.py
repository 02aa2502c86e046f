"""Calibration of multi-label scores: reliability bins, expected calibration error and Brier score.

Each valid entry (image, class) is one binary forecast: its score is the probability that the class is present (Naeini
et al. 2015; per class, the classwise calibration of Kull et al. 2019). Guo et al. (2017) bin the score of the
*predicted* class of a softmax instead, which has no counterpart for several labels per image.

Shape letters: B images, K classes, M bins.
"""

from dataclasses import dataclass

import numpy as np

from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.metric_groups import MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import LabelArray, ScoreMatrix, mean_defined, ratio
from mlmoe_jax.evaluation.metrics.ranking import check_inputs, row_blocks
from mlmoe_jax.runtime.array_types import Floats, Ints


@dataclass(frozen=True)
class Reliability:
    """Sums over the valid entries of a split, per class and bin. All metrics of this module are computed from them.

    The M bins have equal width: bin m has the scores with floor(M · score) = m, and the last bin also has the score 1.
    Each class and bin, [K,M], has its number of entries and of positive entries (i64), and the sum of its scores (f64).
    `squared_error`, f64[K], is the sum of (score − label)² over all bins.
    """

    count: Ints
    positive: Ints
    score: Floats
    squared_error: Floats

    @property
    def mean_score(self) -> Floats:
        """The mean score of each bin, f64[K,M]; nan for an empty bin."""
        return ratio(self.score, self.count)

    @property
    def fraction_positive(self) -> Floats:
        """The fraction of positives in each bin, f64[K,M]; nan for an empty bin."""
        return ratio(self.positive, self.count)

    @property
    def points(self) -> Floats:
        """The mean score, the fraction of positives and the count of each nonempty bin of the first class, f64[m,3]."""
        points = np.stack([self.mean_score[0], self.fraction_positive[0], self.count[0]], axis=1)
        return points[self.count[0] > 0]

    @property
    def expected_calibration_error(self) -> Floats:
        """The expected calibration error (ECE) per class, f64[K]; nan for a class without entries.

        It is the mean over bins of |fraction of positives − mean score|, weighted by the number of entries.
        """
        return ratio(np.abs(self.positive - self.score).sum(axis=1), self.count.sum(axis=1))

    @property
    def brier(self) -> Floats:
        """The Brier score (mean of (score − label)²; Brier 1950) per class, f64[K]; nan for a class without entries."""
        return ratio(self.squared_error, self.count.sum(axis=1))

    def pooled(self) -> "Reliability":
        """Return the sums over all classes, as one class (K = 1).

        Entries have equal weights. In a bin, too high scores of one class can cancel too low scores of another class.
        """
        fields = (self.count, self.positive, self.score, self.squared_error)
        return Reliability(*(x.sum(axis=0, keepdims=True) for x in fields))


def reliability(
    scores: ScoreMatrix, labels: LabelArray, *, mask: LabelArray | None = None, bins: int = 15
) -> Reliability:
    """Count the valid entries of a split in bins of equal width by score, a probability.

    More bins detect finer errors, but with few entries per bin they also measure noise. `mask` is 0 for entries to
    ignore. Raises ValueError if the shapes are wrong, or a valid score is NaN or outside [0, 1].
    """
    scores, positive, valid = check_inputs(scores, labels, mask)
    classes = scores.shape[1]
    count, hits = (np.zeros(classes * bins, np.int64) for _ in range(2))
    total, squared = np.zeros(classes * bins), np.zeros(classes)
    for rows in row_blocks(*scores.shape):
        keep = valid[rows]
        score, label = scores[rows][keep].astype(np.float64), positive[rows][keep]
        _require_probabilities(score)
        class_ = np.broadcast_to(np.arange(classes), keep.shape)[keep]
        bin_ = class_ * bins + np.minimum((score * bins).astype(np.int64), bins - 1)
        count += np.bincount(bin_, minlength=count.size)
        hits += np.bincount(bin_[label], minlength=count.size)
        total += np.bincount(bin_, score, minlength=count.size)
        squared += np.bincount(class_, np.square(score - label), minlength=classes)
    return Reliability(*(x.reshape(classes, bins) for x in (count, hits, total)), squared)


def _require_probabilities(scores: Floats) -> None:
    if scores.size and not (scores.min() >= 0 and scores.max() <= 1):
        raise ValueError("calibration is defined for probabilities, and a score is outside [0, 1]")


_MEANINGS = {
    r"ECE_pooled": "mean distance between score and share of positives per bin, over all scores pooled",
    r"ECE_macro": "mean distance between score and share of positives per bin, per label, averaged over labels",
    r"Brier_pooled": "mean squared distance between score and truth",
}


def measure_calibration(entries: Entries) -> dict[str, float]:
    """Return `ECE_macro`, the mean ECE over labels, and `ECE_pooled` and `Brier_pooled`, of all entries in one list."""
    binned = reliability(entries.scores, entries.positive, mask=entries.valid)
    pooled = binned.pooled()
    return {
        "ECE_pooled": float(pooled.expected_calibration_error[0]),
        "ECE_macro": float(mean_defined(binned.expected_calibration_error)),
        "Brier_pooled": float(pooled.brier[0]),
    }


CALIBRATION_METRICS = MetricGroup("Calibration (lower is better)", _MEANINGS, measure_calibration)
