"""`--mode=calibrate`: fit the calibration of a run to its stored scores, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlmoe_jax.apps.tools.fit_thresholds import open_split_to_fit
from mlmoe_jax.evaluation.decisions.calibration_fit import CALIBRATION_FOLDS, fit_calibration
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder
from mlmoe_jax.runs.thresholds import Thresholds, stored_thresholds, write_thresholds
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import percent, quantity


def calibrate_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = ()) -> Outcome:
    """Fit the calibration of a run according to `config.calibration`, and write it to thresholds.json.

    Thresholds that were fitted to scores before this calibration are replaced by `eval.threshold`, with a message.

    Args:
      folder: the run folder.
      overrides: keys under calibration that differ from the run.

    Returns:
      the metrics of calibration before and after the fit, for the command line.

    Raises:
      UserError: the split is reported, has no scores or is too small.
    """
    config, table, names = open_split_to_fit(folder, overrides)
    stored = stored_thresholds(folder)
    calibration = fit_calibration(table, names, config)
    stale = stored is not None and bool(stored.source)
    if stored is None or stale:
        thresholds = Thresholds.fixed(names, config.eval.threshold, calibration)
    else:
        thresholds = replace(stored, calibration=calibration)
    with folder.writing():
        write_thresholds(folder, thresholds)
    status(
        f"written to {folder / THRESHOLDS}, which --mode=predict, serve and export use; stored scores stay as they are"
    )
    if stale:
        status(
            f"the thresholds were fitted to other scores and are now {config.eval.threshold:g}; fit them again with "
            f"--mode=thresholds --workdir={folder}"
        )
    return Outcome([calibration_table(calibration)])


def calibration_table(calibration: dict[str, Any]) -> Table:
    """Return the metrics of calibration before and after the fit in percent."""
    columns = [
        Column(f"{calibration['split']}, %", align="<", width=14),
        Column("raw", percent, width=8),
        Column("corrected", percent, width=8),
    ]
    rows = [[name, raw, calibration["after"][name]] for name, raw in calibration["before"].items()]
    how = f"{calibration['method']}, on {quantity(calibration['images'], 'image')}"
    note = f"{how}; corrected by {CALIBRATION_FOLDS}-fold cross-validation"
    return Table(columns, rows, notes=[note], document=calibration)
