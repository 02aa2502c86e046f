"""The uncertainty of a run's own metrics: how much they vary over resamples of the evaluated images (bootstrap).

Shape letters: N images, K labels, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import RESAMPLES, SEED
from mlmoe_jax.evaluation.metrics.bootstrap import WeightedMetrics, draw, standard_interval
from mlmoe_jax.evaluation.metrics.rates import mean_defined

MOST_LABELS = 2000  # each label is ranked in each resample
FEWEST = 100  # resamples of a large split
_MOST_ENTRIES = 2e9  # scores in all resamples together: a few seconds


@dataclass(frozen=True)
class Resampled:
    """The metrics of the main split in each resample: name -> f64[R], and the average precision f64[R,K]."""

    metrics: Mapping[str, np.ndarray]
    ap: np.ndarray

    @property
    def count(self) -> int:
        """The number of resamples."""
        return len(self.ap)

    def interval(self, name: str, value: float) -> tuple[float, float] | None:
        """Return the ends of the 95 % interval around the value of a metric; None if not resampled, or undefined."""
        return _ends(value, self.metrics[name]) if name in self.metrics else None

    def mean_ap(self, labels: Sequence[int] | np.ndarray, value: float) -> tuple[float, float] | None:
        """Return the ends of the 95 % interval around the mean AP of some labels; None if it is undefined."""
        return _ends(value, mean_defined(self.ap[:, labels]))


def _ends(value: float, values: np.ndarray) -> tuple[float, float] | None:
    low, high = standard_interval(value, values)
    return None if np.isnan(low) else (low, high)


def resample(files: RunFiles, *, most: int = RESAMPLES) -> Resampled | None:
    """Resample the images of the main split with replacement, at most `most` times and fewer for a large split.

    None without scores, or with more than MOST_LABELS labels.
    """
    main = files.main_split
    if main is None or main.scores is None or not len(main.scores):
        return None
    images, labels = main.scores.codes.shape
    if labels > MOST_LABELS:
        return None
    count = min(most, max(FEWEST, int(_MOST_ENTRIES / (images * labels))))
    config = files.settings(main.scores.prefix)
    label, mask = main.scores.targets(config.data.difficult_eval)
    measure = WeightedMetrics(main.scores.scores, label, mask, config.eval.threshold)
    parts = [measure(weights) for weights in draw(images, count, SEED)]
    metrics = {name: np.concatenate([of[name] for of, _ in parts]) for name in parts[0][0]}
    return Resampled(metrics, np.concatenate([ap for _, ap in parts]))
