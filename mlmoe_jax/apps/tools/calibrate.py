"""`--mode=calibrate`: fit the calibration of a run to its stored scores, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlmoe_jax.apps.tools.fit_thresholds import open_split_to_fit
from mlmoe_jax.errors import DONE, UserError
from mlmoe_jax.evaluation.fit_calibration import FOLDS, fit_split
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder
from mlmoe_jax.runs.thresholds import Thresholds, stored_thresholds, write_thresholds
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import percent, quantity, text_table


def calibrate_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = (), *, as_json: bool = False) -> int:
    """Fit the calibration of a run according to `config.calibration`, write it to thresholds.json and print the change.

    The thresholds of the run stay. `overrides` has keys under calibration that differ from the run. Returns the exit
    code. Raises UserError if the split is reported, has no scores or is too small.
    """
    config, table, names = open_split_to_fit(folder, overrides, "calibration")
    fixed = Thresholds(dict.fromkeys(names, float(config.eval.threshold)))
    present = stored_thresholds(folder) or fixed
    if config.calibration.operating_point and not present.source:
        raise UserError("calibration.operating_point needs fitted thresholds; run --mode=thresholds first")
    calibration = fit_split(table, names, config)
    with folder.writing():
        write_thresholds(folder, replace(present, calibration=calibration))
    print(dump_json(calibration, indent=2) if as_json else format_calibration(calibration))
    status(
        f"written to {folder / THRESHOLDS}, which --mode=predict, serve and export use; stored scores stay as they are"
    )
    return DONE


def format_calibration(calibration: dict) -> str:
    """Return the metrics of calibration before and after the fit in percent."""
    rows = [[f"{calibration['split']}, %", "raw", "corrected"]]
    rows += [[name, percent(raw), percent(calibration["after"][name])] for name, raw in calibration["before"].items()]
    how = f"{calibration['method']}, on {quantity(calibration['images'], 'image')}"
    return f"{text_table(rows, least=(14, 8))}\n{how}; corrected by {FOLDS}-fold cross-validation"
