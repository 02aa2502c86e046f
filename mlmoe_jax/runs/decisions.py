"""How the scores of a run become decisions: its thresholds and its calibration, which thresholds.json holds.

`models.calibration` and `models.consistency` have the functions that the model computes with, and
`evaluation.decisions` the fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from scipy.special import logit

from mlmoe_jax.data.label_tree import INDEPENDENT, Attribute, LabelTree
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.attributes import AttributeSoftmax
from mlmoe_jax.models.calibration import Calibration
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder, training_finished
from mlmoe_jax.runtime.array_types import Bools, Floats
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import keep_edited

_logger = logging.getLogger(__name__)

_LIMITS = -104.0, 25 * np.log(2)  # logits of the numbers that float32 rounds to 0 and to 1


def to_logits(scores: np.ndarray) -> Floats:
    """Return the finite logits f64[...] of stored probabilities [...].

    Probabilities that float32 rounded to 0 or 1 get the limits in _LIMITS.
    """
    return np.clip(logit(np.asarray(scores, np.float64)), *_LIMITS)


@dataclass(frozen=True)
class Thresholds:
    """The thresholds and the calibration (a function from raw probabilities to reported scores) of a run.

    Thresholds are compared with reported scores, so thresholds that were fitted with one calibration must not be used
    with another.

    Attributes:
      values: label -> the lowest reported score at which the label is predicted; infinity: it is never predicted.
      source: how the thresholds were fitted, with the keys of thresholds.json (`split`, `goal`, …); {} if they were not
        fitted.
      calibration: the result of `calibration_fit.fit_calibration`; {} without a calibration.
    """

    values: dict[str, float]
    source: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fixed(cls, names: Sequence[str], threshold: float, calibration: Mapping[str, Any] | None = None) -> Thresholds:
        """Return thresholds that are equal to `threshold` for all labels, with a calibration if one is given."""
        return cls(dict.fromkeys(names, float(threshold)), {}, dict(calibration or {}))

    def limits(self, names: Sequence[str]) -> Floats:
        """Return the thresholds of the labels `names`, f64[K]; UserError if a label has no threshold."""
        return np.array([_entry(self.values, name, "threshold", "thresholds") for name in names], np.float64)

    def correction(self, names: Sequence[str], attributes: Sequence[Attribute] = ()) -> Calibration:
        """Return the function from logits to the reported scores of labels; without a calibration it is the sigmoid.

        Raises UserError if a label has no calibration, and ValueError if a stored scale is not positive, or a stored
        parameter is not finite.
        """
        if not self.calibration:
            return Calibration()
        stored = [_entry(self.calibration["labels"], name, "calibration", "calibrate") for name in names]
        scale, offset = (np.array([entry[part] for entry in stored], np.float64) for part in ("scale", "offset"))
        if not (scale > 0).all() or not np.isfinite([scale, offset]).all():  # the model may be from somebody else
            raise ValueError("a calibration does not increase")
        softmax = AttributeSoftmax.of(attributes, len(names))
        return Calibration(scale, offset, fitted_on=self.calibration["split"], softmax=softmax)

    def correct(self, scores: Floats, names: Sequence[str], tree: LabelTree = INDEPENDENT) -> Floats:
        """Return the reported scores f64[N,K] of raw probabilities f64[N,K] of the K labels `names`.

        They are calibrated, then adjusted to agree with the tree of labels. By default no label implies or excludes
        another.
        """
        corrected = self.correction(names, tree.attributes)(to_logits(scores)) if self.calibration else scores
        return self.consistency(names, tree)(corrected) if tree else corrected

    def consistency(self, names: Sequence[str], tree: LabelTree) -> Consistency:
        """Return the function that adjusts scores to agree with a tree of the labels `names` at these thresholds."""
        return Consistency.of(tree, self.limits(names), len(names))

    def predict(self, scores: Floats, names: Sequence[str], tree: LabelTree = INDEPENDENT) -> Bools:
        """Return which labels are predicted, bool[N,K], in agreement with the tree; see `correct` for the arguments."""
        return self.consistency(names, tree).assign(self.correct(scores, names, tree))

    def used(self, config: ConfigDict, names: Sequence[str], *, replaced: bool) -> Thresholds:
        """Return the thresholds and the calibration with which a run predicts, by the config of the prediction.

        If `calibration.use` is false, the result has no calibration. Thresholds that were fitted to calibrated scores
        are then replaced by `eval.threshold`. If `replaced` is True, `eval.threshold` replaces all thresholds.
        """
        threshold = float(config.eval.threshold)
        calibration = self.calibration if config.calibration.use else {}
        if replaced:
            return Thresholds.fixed(names, threshold, calibration)
        if self.source and self.calibration and not calibration:
            status(f"the fitted thresholds are of corrected scores, so raw scores get the threshold {threshold:g}")
            return Thresholds.fixed(names, threshold)
        return replace(self, calibration=calibration)


def _entry(stored: Mapping[str, Any], name: str, what: str, mode: str) -> Any:
    if name not in stored:
        raise UserError(f"{THRESHOLDS} has no {what} for label {name}; fit it again with mlmoe {mode}")
    return stored[name]


# ---------------------------------------------------------------------------------------------------------- the file
def read_thresholds(folder: RunFolder) -> Thresholds:
    """Return the thresholds in thresholds.json of a run folder; UserError if it is missing or damaged.

    The file contains {"thresholds": {label: threshold}, "calibration": {…}, …}. The other entries are
    `Thresholds.source`. A threshold of null means that the label is never predicted.
    """
    folder.require(THRESHOLDS)
    with folder.reading(THRESHOLDS):
        source = folder.read_json(THRESHOLDS)
        values, calibration = source.pop("thresholds"), source.pop("calibration", {})
        values = {name: math.inf if value is None else float(value) for name, value in values.items()}
        stored = Thresholds(values, source, calibration)
        if np.isnan(list(values.values())).any():
            raise ValueError("nan is no threshold")
        if calibration:
            stored.correction(list(calibration["labels"]))
        return stored


def stored_thresholds(folder: RunFolder) -> Thresholds | None:
    """Return the thresholds of a run folder, None if it has none; UserError if thresholds.json is damaged."""
    return read_thresholds(folder) if (folder / THRESHOLDS).exists() else None


def write_thresholds(folder: RunFolder, thresholds: Thresholds) -> None:
    """Write thresholds.json to a run folder. An existing file is replaced, or renamed if somebody has edited it."""
    calibration = {"calibration": thresholds.calibration} if thresholds.calibration else {}
    value = {**thresholds.source, **calibration, "thresholds": thresholds.values}
    content = (dump_json(value, indent=2) + "\n").encode()
    keep_edited(folder / THRESHOLDS, hashlib.sha256(content).hexdigest())
    folder.write_bytes(THRESHOLDS, content)


def write_fixed(folder: RunFolder, names: Sequence[str], threshold: float) -> None:
    """Write one threshold for all labels to thresholds.json.

    If the training is finished, an existing file is kept, because it may have been fitted or edited after the training.
    If not, thresholds and a calibration in the file are replaced, because training changes the scores.
    """
    replaced = (folder / THRESHOLDS).exists()
    with folder.changing_results() if replaced else contextlib.nullcontext():
        if replaced and training_finished(folder):
            return
        with contextlib.suppress(UserError):  # a damaged file is replaced too
            if replaced and read_thresholds(folder).source:
                _logger.warning("%s was fitted before the end of the training, and is replaced", folder / THRESHOLDS)
        write_thresholds(folder, Thresholds.fixed(names, threshold))
