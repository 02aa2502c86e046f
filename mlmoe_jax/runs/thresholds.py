"""The file of thresholds in a run folder, which also has the calibration of the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.calibration import Calibration, logits_of
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder, training_finished

Floats = NDArray[np.float64]
_NEVER = 1 + 1e-6  # the threshold of a label that is never predicted, above every probability


@dataclass(frozen=True)
class Thresholds:
    """The thresholds and the calibration of a run: how its raw probabilities become scores and predictions.

    `values` has label -> the lowest probability at which it is predicted; infinity = never. Fitted thresholds are raw
    probabilities, so that they do not depend on the calibration. A fixed threshold is one of the reported score.
    `source` says how they were fitted, as in thresholds.json: `split`, `goal`, …; {} if they were not fitted.
    `calibration` has the result of `fit_calibration.fit_split`; {} without any.
    """

    values: dict[str, float]
    source: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)

    def fitted_for(self, split: str, names: Sequence[str]) -> dict[str, Floats]:
        """Return {"fitted": f64[K]}, the fitted thresholds in the order of `names`, for the metrics of a split.

        They are thresholds of raw probabilities. Returns {} if the thresholds were not fitted, or were fitted on this
        split. Raises UserError if a label has no threshold.
        """
        return {} if self.source.get("split", split) == split else {"fitted": self.raw(names)}

    def raw(self, names: Sequence[str]) -> Floats:
        """Return the stored thresholds of labels, f64[K]; UserError if one of them has none."""
        return np.array([_of(self.values, name, "threshold", "thresholds") for name in names], np.float64)

    def of(self, names: Sequence[str]) -> Floats:
        """Return the thresholds of the reported scores of labels, f64[K]; UserError if a label has none."""
        limits = self.raw(names)
        if not (self.source and self.calibration):
            return limits
        return np.where(np.isinf(limits), np.inf, self.correction(names)(logits_of(np.minimum(limits, 1))))

    @property
    def reported(self) -> dict[str, float]:
        """The thresholds of the reported scores, by label."""
        return dict(zip(self.values, self.of(list(self.values)).tolist(), strict=True))

    def correction(self, names: Sequence[str]) -> Calibration:
        """Return the function from logits to reported scores of labels; UserError if a label has no calibration."""
        if not self.calibration:
            return Calibration()
        stored = [_of(self.calibration["labels"], name, "calibration", "calibrate") for name in names]
        parts = [_checked(entry) for entry in stored]
        scale, offset, weight = (np.array([part[n] for part in parts], np.float64) for n in range(3))
        knots = [part[3] for part in parts] if weight.any() else ()
        function = Calibration(scale, offset, weight, knots, fitted_on=str(self.calibration["split"]))
        if not (self.source and self.calibration["operating_point"]):
            return function
        limits = self.raw(names)
        return replace(function, middle=np.where(np.isinf(limits), _NEVER, function(logits_of(np.minimum(limits, 1)))))

    def correct(self, scores: Floats, names: Sequence[str], tree: LabelTree = INDEPENDENT) -> Floats:
        """Return the reported scores of raw probabilities f64[N,K], in agreement with a tree of the labels."""
        corrected = self.correction(names)(logits_of(scores)) if self.calibration else scores
        return Consistency.of(tree, self.of(names), len(names))(corrected) if tree else corrected

    def outside(self, split: str) -> Thresholds:
        """Return the thresholds without a calibration that was fitted on this split, whose scores it makes too good."""
        return replace(self, calibration={}) if self.calibration.get("split") == split else self


def _of(stored: Mapping[str, Any], name: str, what: str, mode: str) -> Any:
    if name not in stored:
        raise UserError(f"{THRESHOLDS} has no {what} for label {name}; fit it again with --mode={mode}")
    return stored[name]


def _checked(entry: Mapping[str, Any]) -> tuple[float, float, float, Floats]:
    """Return scale, offset, weight and knots of a label; ValueError if they do not give an increasing function."""
    scale, offset, weight = (float(entry.get(key, 0)) for key in ("scale", "offset", "weight"))
    knots = np.array(entry.get("knots", [[0.0], [0.0]]), np.float64)
    rising = knots.ndim == 2 and len(knots) == 2 and knots.size and (np.diff(knots) >= 0).all()
    inside = rising and (np.diff(knots[0]) > 0).all() and knots.min() >= 0 and knots.max() <= 1
    if not (inside and 0 < scale < math.inf and math.isfinite(offset) and 0 <= weight < 1):
        raise ValueError(
            f"a calibration of scale {scale}, offset {offset} and weight {weight} is not an increasing one"
        )
    return scale, offset, weight, knots


def read_thresholds(folder: RunFolder) -> Thresholds:
    """Read thresholds.json. Raises UserError if it is missing or damaged.

    It is {label: threshold}, or {"thresholds": {label: threshold}, "split": …, "calibration": {…}, …} for fitted ones
    and for calibrated scores; null = never.
    """
    folder.require(THRESHOLDS)
    values, source, calibration = folder.read_json(THRESHOLDS), {}, {}
    with folder.reading(THRESHOLDS):
        if isinstance(values.get("thresholds"), dict):
            source = {key: value for key, value in values.items() if key not in ("thresholds", "calibration")}
            values, calibration = values["thresholds"], values.get("calibration", {})
        stored = Thresholds({name: _threshold(value) for name, value in values.items()}, source, calibration)
        if calibration:
            stored.correction(list(calibration["labels"]))
        return stored


def stored_thresholds(folder: RunFolder) -> Thresholds | None:
    """Return the thresholds of a run, None without any; UserError if they are damaged."""
    return read_thresholds(folder) if (folder / THRESHOLDS).exists() else None


def _threshold(value: Any) -> float:
    number = math.inf if value is None else float(value)
    if math.isnan(number):
        raise ValueError("nan is no threshold")
    return number


def write_thresholds(folder: RunFolder, thresholds: Thresholds) -> None:
    """Replace thresholds.json."""
    flat, more = dict(thresholds.values), dict(thresholds.source)
    if thresholds.calibration:
        more["calibration"] = thresholds.calibration
    folder.write_json(THRESHOLDS, {**more, "thresholds": flat} if more else flat)


def write_fixed(folder: RunFolder, names: Sequence[str], threshold: float) -> None:
    """Give every label one threshold, unless the folder holds a fit to the scores of a finished training.

    Thresholds and a calibration that were fitted before the end of the training are replaced, because the scores have
    changed since.
    """
    if training_finished(folder) and (folder / THRESHOLDS).exists():
        present = read_thresholds(folder)
        if (present.source or present.calibration) and set(present.values) == set(names):
            return
    write_thresholds(folder, Thresholds(dict.fromkeys(names, threshold)))
