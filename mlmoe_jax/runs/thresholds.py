"""The file of thresholds in a run folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RESULTS, THRESHOLDS, RunFolder

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of a run: label -> the lowest probability at which it is predicted; infinity = never.

    `source` says how they were fitted, as in thresholds.json: `split`, `goal`, …; {} if they were not fitted.
    """

    values: dict[str, float]
    source: dict[str, Any] = field(default_factory=dict)

    def fitted_for(self, split: str, names: Sequence[str]) -> dict[str, Floats]:
        """Return {"fitted": f64[K]}, the fitted thresholds in the order of `names`, for the metrics of a split.

        Returns {} if the thresholds were not fitted, or were fitted on this split. Raises
        UserError if a label has no threshold.
        """
        return {} if self.source.get("split", split) == split else {"fitted": self.of(names)}

    def of(self, names: Sequence[str]) -> Floats:
        """Return the thresholds of labels, f64[K]; UserError if one of them has none."""
        if missing := [name for name in names if name not in self.values]:
            raise UserError(
                f"{THRESHOLDS} has no threshold for label {missing[0]}; fit it again with --mode=thresholds"
            )
        return np.array([self.values[name] for name in names], np.float64)


def read_thresholds(folder: RunFolder) -> Thresholds:
    """Read thresholds.json. Raises UserError if it is missing or damaged.

    It is {label: threshold}, or {"thresholds": {label: threshold}, "split": …, …} for fitted ones; null = never.
    """
    folder.require(THRESHOLDS)
    stored = folder.read_json(THRESHOLDS)
    values, source = stored, {}
    if isinstance(stored.get("thresholds"), dict):
        values, source = stored["thresholds"], {key: value for key, value in stored.items() if key != "thresholds"}
    with folder.reading(THRESHOLDS):
        return Thresholds({name: _threshold(value) for name, value in values.items()}, source)


def _threshold(value: Any) -> float:
    number = math.inf if value is None else float(value)
    if math.isnan(number):
        raise ValueError("nan is no threshold")
    return number


def write_thresholds(folder: RunFolder, thresholds: Thresholds) -> None:
    """Replace thresholds.json."""
    flat = dict(thresholds.values)
    folder.write_json(THRESHOLDS, {**thresholds.source, "thresholds": flat} if thresholds.source else flat)


def write_fixed(folder: RunFolder, names: Sequence[str], threshold: float) -> None:
    """Give every label one threshold, unless the folder holds fitted thresholds of a finished training.

    Thresholds that were fitted before the end of the training are replaced, because the scores have changed since.
    """
    if (folder / RESULTS).exists() and (folder / THRESHOLDS).exists():
        present = read_thresholds(folder)
        if present.source and set(present.values) == set(names):
            return
    write_thresholds(folder, Thresholds(dict.fromkeys(names, threshold)))
