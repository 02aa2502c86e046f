"""Select the weights for evaluation and prediction, and stop training early, by one metric on one split.

The rules follow Query2Label's training code (55eb050), which ML-VPT's code (4fd40e4) adopts. Raw and averaged weights
are evaluated after each epoch. The better weights are a candidate; if both results are equal, the raw weights. The
candidate is selected only if its result exceeds all earlier results.

Training stops if both conditions hold:

1. The best result of all weights and the best result of the raw weights are both more than `patience` epochs old.
   `patience` is 6 in ML-VPT's code and 8 in Query2Label's code.
2. The current result of the averaged weights is below the best result of the averaged weights.

So a new best result of the averaged weights that is not the best of all does not restart the wait. But training does
not stop at a step at which the averaged weights have their best result.

The authors' code does not define three cases. Without averaged weights, condition 1 alone decides. An undefined result
(nan) is never the best, and an undefined result of averaged weights does not fulfill condition 2; the authors' code
ends with an error if a loss is nan. A first result of 0 is a best result; the authors' code requires more than 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.metric_groups import selectable_metrics
from mlmoe_jax.models.params import Params
from mlmoe_jax.runtime.registry import suggestion


def selection_split(config: ConfigDict) -> str:
    """Return the name of the split on which weights are selected during training; "" if there is none."""
    return config.data.test_splits[0] if config.eval.select_on == "test" else config.data.val_split


def require_metric(config: ConfigDict) -> None:
    """Raise UserError if weights cannot be selected by the metric `eval.select_metric`."""
    metric, known = config.eval.select_metric, selectable_metrics(config)
    if metric not in known:
        raise UserError(
            f"eval.select_metric is '{metric}' and must be a metric that is computed during training and better if "
            f"higher{suggestion(metric, known)}"
        )


@dataclass
class Selection:
    """The weights selected so far, and the results that early stopping depends on.

    All attributes are stored in checkpoints, so a resumed run selects and stops like an uninterrupted run. The kinds of
    weights are `raw` and `ema` (moving averages).
    """

    values: Params  # path -> selected value
    metric: str = "mAP"
    step: int = 0  # the step of the selected weights
    kind: str = "ema"
    split: str = ""  # the split on which the weights were selected; "" if they were selected without a metric
    best: dict[str, float] = field(default_factory=dict)  # kind -> highest result so far
    best_step: dict[str, int] = field(default_factory=dict)  # kind -> the step of the highest result
    finished: bool = False  # whether training stops early

    def consider(
        self, step: int, split: str, candidates: Mapping[str, tuple[float, Params]], *, patience: int = 0
    ) -> None:
        """Select the best candidate if its result exceeds all earlier results, and update the attribute `finished`.

        Args:
          candidates: kind of weights -> (result on `split`, values after `step`). If results are equal, the first kind
            is selected.
          patience: as in the docstring of the module, but in steps; 0 = never stop.
        """
        results = {kind: result for kind, (result, _) in candidates.items() if not math.isnan(result)}
        kind = max(results, key=results.__getitem__, default="")
        if kind and results[kind] > max(self.best.values(), default=-math.inf):
            self.keep(step, kind, split, candidates[kind][1])
        for kind, result in results.items():
            if result > self.best.get(kind, -math.inf):
                self.best[kind], self.best_step[kind] = result, step
        waited = step - max(self.step, self.best_step.get("raw", 0))
        averages_fell = "ema" not in candidates or candidates["ema"][0] < self.best.get("ema", -math.inf)
        self.finished = bool(patience and self.best) and waited > patience and averages_fell

    def keep(self, step: int, kind: str, split: str, values: Params) -> None:
        """Select `values` without comparing results."""
        self.values, self.step, self.kind, self.split = values, step, kind, split

    def notes(self) -> dict[str, Any]:
        """Return all attributes except `values` as JSON data for a checkpoint. `from_notes` is the inverse."""
        return {name: copy.copy(getattr(self, name)) for name in _NOTES}

    @classmethod
    def from_notes(cls, values: Params, notes: Mapping[str, Any]) -> Selection:
        """Return the selection stored in a checkpoint. Keys of `notes` that `Selection.notes` does not return are
        ignored.
        """
        return cls(values, **{name: copy.copy(notes[name]) for name in _NOTES})

    def __str__(self) -> str:
        reason = "the last"
        if self.split:
            reason = f"best {self.metric} on {self.split}, {100 * max(self.best.values()):.2f} %"
        return f"{self.kind} weights of step {self.step} ({reason})"


_NOTES = tuple(entry.name for entry in fields(Selection) if entry.name != "values")
