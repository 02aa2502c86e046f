"""Fit the thresholds of a run to the reported scores of a validation split, as `config.thresholds` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.decisions.fitting_split import warn_if_trained_on
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.multilabel import precision_recall_f1
from mlmoe_jax.evaluation.metrics.threshold_search import best_thresholds, least_to_bound
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.thresholds import Thresholds

# Labels with fewer positive images share one threshold. Otherwise one positive image with a low score could lead to a
# threshold at which a label is predicted almost everywhere.
LEAST_OWN_POSITIVES = 10


@dataclass(frozen=True)
class _Goal:
    """What thresholds should reach, as `config.thresholds` says.

    Attributes:
      name: "f1", "precision" or "miss_rate".
      level: {name: level}; {} for "f1".
      per: "class" or "global".
      least: the least number of positive images of a label with a threshold of its own.
    """

    name: str
    level: dict[str, float]
    per: str
    least: int

    @classmethod
    def of(cls, config: ConfigDict) -> _Goal:
        settings = config.thresholds
        if settings.goal == "f1":
            return cls("f1", {}, settings.per, LEAST_OWN_POSITIVES)
        least = LEAST_OWN_POSITIVES
        if settings.goal == "miss_rate":
            least = max(least, least_to_bound(settings.miss_rate))
        return cls(settings.goal, {settings.goal: settings[settings.goal]}, settings.per, least)

    @property
    def bounds_misses(self) -> bool:
        return self.name == "miss_rate"

    def describe(self) -> dict[str, Any]:
        """Return the goal as `Thresholds.source` has it."""
        return {"per": self.per, "goal": self.name, **self.level, "least_positives": self.least}

    def search(self, entries: Entries, labels: Bool[np.ndarray, " k"], per: str) -> Float[np.ndarray, " k"]:
        """Return the best thresholds of some labels."""
        return best_thresholds(
            entries.scores[:, labels],
            entries.positive[:, labels],
            mask=entries.valid[:, labels],
            per=per,
            goal=self.name,
            **self.level,
        )


def fit_thresholds(
    table: SplitScores, names: Sequence[str], config: ConfigDict, stored: Thresholds | None = None
) -> Thresholds:
    """Fit thresholds to the images of a split that have scores, see `threshold_search.best_thresholds`.

    With one threshold per label, labels with fewer than LEAST_OWN_POSITIVES positives share a threshold that is fitted
    to all labels together. With goal="miss_rate" these are also the labels with too few positives for the bound, and
    they share a threshold that is fitted to their own misses; it is 0 if their images are too few.

    Args:
      table: the raw scores of the split.
      names: the names of the K labels.
      config: the config of the run.
      stored: the thresholds of the run, whose calibration corrects the scores and is kept.

    Returns:
      the thresholds. `source` describes the fit, with the results of `multilabel.precision_recall_f1` at the fixed and
      at the fitted thresholds.

    Raises:
      UserError: no label has a positive, or no threshold reaches the goal.
    """
    warn_if_trained_on(table, config)
    goal, table = _Goal.of(config), table.readable()
    calibrated = Thresholds({}, calibration={} if stored is None else stored.calibration)
    entries = Entries.of(calibrated.correct(table.scores, names), table.codes, config.data.difficult_eval)
    if goal.bounds_misses:
        _require_enough(table, entries, config.thresholds.miss_rate)
    thresholds, few = _search_all(goal, entries)
    _require_reached(table, thresholds, config)
    always = (thresholds == 0) & goal.bounds_misses
    source = {
        "split": table.name,
        "images": len(table),
        **goal.describe(),
        "fixed": config.eval.threshold,
        "shared": _selected(names, few),
        "always": _selected(names, always),
        "never": _selected(names, np.isposinf(thresholds)),
        "before": _predict_and_measure(entries, config.eval.threshold),
        "after": _predict_and_measure(entries, thresholds),
    }
    return Thresholds(dict(zip(names, thresholds.tolist(), strict=True)), source, calibrated.calibration)


def _predict_and_measure(entries: Entries, thresholds: float | Float[np.ndarray, " k"]) -> dict[str, float]:
    return precision_recall_f1(entries.scores >= thresholds, entries.positive, mask=entries.valid)


def _search_all(goal: _Goal, entries: Entries) -> tuple[Float[np.ndarray, " k"], Bool[np.ndarray, " k"]]:
    """Return the thresholds of all labels, and which labels share one because they have few positives."""
    thresholds = goal.search(entries, np.ones(entries.scores.shape[1], bool), goal.per)
    few = np.zeros(len(thresholds), bool)
    if goal.per == "class":
        few = (entries.positive & entries.valid).sum(axis=0) < goal.least
    if few.any():
        thresholds = np.where(few, _shared_threshold(goal, entries, few), thresholds)
    return thresholds, few


def _shared_threshold(goal: _Goal, entries: Entries, few: Bool[np.ndarray, " k"]) -> float:
    """Return the threshold of the labels with few positives."""
    if not goal.bounds_misses:
        return goal.search(entries, np.ones_like(few), "global")[0]
    return np.nan_to_num(goal.search(entries, few, "global")[0], nan=0.0)


def _selected(names: Sequence[str], chosen: Bool[np.ndarray, " k"]) -> list[str]:
    return [names[k] for k in np.flatnonzero(chosen)]


def _require_reached(table: SplitScores, thresholds: Float[np.ndarray, " k"], config: ConfigDict) -> None:
    """Raise UserError if no label has a threshold that reaches the goal."""
    if np.isnan(thresholds).all():
        raise UserError(f"no label has a positive among the {len(table):,} images of {table.name} that have scores")
    if not np.isfinite(thresholds).any():
        raise UserError(
            f"a precision of {config.thresholds.precision:g} is not reached on {table.name} by any label at any "
            "threshold; lower --config.thresholds.precision"
        )


def _require_enough(table: SplitScores, entries: Entries, miss_rate: float) -> None:
    """Raise UserError if a split has too few images with a present label for a bound on the misses."""
    images = int((entries.positive & entries.valid).any(axis=1).sum())
    least = least_to_bound(miss_rate)
    if images < least:
        raise UserError(
            f"a miss rate of {miss_rate:g} needs {least:,} images with a label, and {table.name} has {images:,}; raise "
            "--config.thresholds.miss_rate, or fit on more images"
        )
