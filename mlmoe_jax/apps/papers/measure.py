"""The numbers of a table as this package measures them, with the definitions of the paper."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cache

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers.paper import MISSING, Recipe, Row
from mlmoe_jax.apps.papers.request import Request
from mlmoe_jax.apps.tools.preflight.cost import summarize
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.metrics import published
from mlmoe_jax.evaluation.metrics.multilabel import sample_deviation
from mlmoe_jax.evaluation.results import read_scores, require_split, training_results
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import read_config, read_label_space
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.training.resume import changed_keys

# Columns that need no training: part of `summarize`, unit.
COSTS = {
    "total, M": ("params", "total", 1e6),
    "trainable, M": ("params", "trainable", 1e6),
    "FLOPs, G": ("macs", "layers", 1e9),
}
_PAIR = re.compile(r"p\((.+) \| (.+)\)")  # the share of the training images with the second label that have the first


@dataclass(frozen=True)
class Outcome:
    """The numbers of a row: the mean over seeds, nan if undefined, and the sample deviation; state: a remark."""

    row: Row
    ours: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)  # {} for one seed
    state: str = ""
    seeds: int = 0  # number of finished runs

    def difference(self, column: str) -> float:
        """Ours minus the published number; nan if one is missing."""
        value = self.row.numbers[column].value
        return self.ours.get(column, math.nan) - (math.nan if value is None else value)


class Measurements:
    """The numbers of all rows of a request; what a run has is computed once."""

    def __init__(self, request: Request, folder: RunFolder):
        self._request, self._folder = request, folder
        self._metrics, self._cost, self._fits = cache(self._metrics), cache(self._cost), cache(self._fits)

    def outcome(self, row: Row) -> Outcome:
        """Return the numbers of a row as far as they can be computed now."""
        if row.recipe is None:
            return Outcome(row, state="this package does not have it")
        runs = self._request.runs_of(row.recipe)
        measured = [self._columns(run, row) for run in runs]
        if row.over is not None:
            others = [self._columns(run, row) for run in self._request.runs_of(row.over)]
            measured = [
                {column: one[column] - other[column] for column in one.keys() & other.keys()}
                for one, other in zip(measured, others, strict=True)
            ]
        values = {column: [one[column] for one in measured if column in one] for column in row.numbers}
        ours = {column: float(np.mean(of)) for column, of in values.items() if of}
        spread = {column: sample_deviation(of) for column, of in values.items() if len(of) > 1 and column not in COSTS}
        finished = sum(map(self._is_finished, runs))
        if row.numbers:
            state = MISSING if row.numbers.keys() - ours.keys() else ""
        else:
            state = "trained" if finished == len(runs) else "not trained"
        return Outcome(row, ours, spread, state, finished)

    def _columns(self, run: Recipe, row: Row) -> dict[str, float]:
        """Return the columns of a row for one run; before it is finished, only those that need no training."""
        values = dict(self._cost(run)) if COSTS.keys() & row.numbers.keys() else {}
        if self._is_finished(run):
            metrics, space = self._metrics(run, row.evaluator)
            for column in row.numbers.keys() - COSTS.keys():
                values[column] = _value(row.metrics.get(column, column), metrics, space)
        return values

    def _is_finished(self, run: Recipe) -> bool:
        return training_results(self._folder.below(run.name)) is not None and self._fits(run)

    def _fits(self, run: Recipe) -> bool:
        """Return whether a run was trained with the keys of this request; print it if not."""
        config = configuration.load_config(run.reference, self._request.overrides_of(run))
        if changed := changed_keys(config, self._folder.below(run.name)):
            status(f"{run.name} is not in the table, because it was trained differently: {'; '.join(changed)}")
        return not changed

    def _metrics(self, run: Recipe, evaluator: str) -> tuple[dict[str, float], LabelSpace]:
        """Return metric -> percent of a finished run on its first test split, and its label space."""
        folder = self._folder.below(run.name)
        scored = require_split(folder, read_scores(folder), read_config(folder).data.test_splits[0])
        scores, codes, space = scored.scores[scored.read], scored.codes[scored.read], read_label_space(folder)
        metrics = published.preset(evaluator, scores, codes, frequency=space.frequency)
        per_label = published.average_precisions(evaluator, scores, codes)
        metrics |= {f"AP {name}": value for name, value in zip(space.names, per_label, strict=True)}
        return {name: 100 * value for name, value in metrics.items()}, space

    def _cost(self, run: Recipe) -> dict[str, float]:
        counts = summarize(configuration.load_config(run.reference, self._request.overrides_of(run)))
        return {name: counts[part][key] / unit for name, (part, key, unit) in COSTS.items()}


def _value(column: str, metrics: dict[str, float], space: LabelSpace) -> float:
    """Return a metric in percent, or the share of a pair of labels; nan if the data set lacks the labels."""
    if pair := _PAIR.fullmatch(column):
        if not set(pair.groups()) <= set(space.names):
            return math.nan
        first, second = map(space.names.index, pair.groups())
        return float(space.counts[first, second] / space.positives[second])
    return metrics.get(column, math.nan) if column.startswith("AP ") else metrics[column]
