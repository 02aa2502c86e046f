"""`mlmoe calibrate`: fit the calibration of a run to its stored scores, without running the model."""

from collections.abc import Sequence
from dataclasses import replace

from mlmoe_jax.apps.tools.fit_thresholds import changing_thresholds, fit_table, open_split_to_fit
from mlmoe_jax.config.table import keys_read
from mlmoe_jax.evaluation.decisions.calibration_fit import CALIBRATION_FOLDS, fit_calibration
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds
from mlmoe_jax.runs.decisions import Thresholds, write_thresholds
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import quantity


def calibrate_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = ()) -> Outcome:
    """Fit the calibration of a run according to `config.calibration`, and write it to thresholds.json.

    Fitted thresholds are fitted again to the calibrated scores, on the same split and with the same goal. `overrides`
    are pairs of key and text, for keys of the stage `calibrate`. The returned table has the calibration metrics before
    and after.

    Raises:
      UserError: the split to fit on is one of the test splits whose metrics the run reports, has no stored scores, or
        has too few images.
    """
    with changing_thresholds(folder) as run:
        config, table = open_split_to_fit(run, overrides, "calibrate")
        stored = run.thresholds or Thresholds.fixed(run.labels, config.eval.threshold)
        calibrated = replace(stored, calibration=fit_calibration(table, run.labels, config))
        if stored.source:
            goal = {key: key.rpartition(".")[2] for key in keys_read("fit")}
            config.update_from_flattened_dict(
                {key: stored.source[name] for key, name in goal.items() if name in stored.source}
            )
            fitted_on = run.split(stored.source["split"])
            calibrated = fit_thresholds(fitted_on, run.labels, config, calibrated, run.categories)
            status("the thresholds were fitted to other scores, and are fitted again to the corrected ones")
        write_thresholds(folder, calibrated)
    status(f"written to {folder / THRESHOLDS}, which mlmoe predict, serve and export use")
    fit = calibrated.calibration
    images = quantity(fit["images"], "image")
    note = f"{fit['method']}, on {images}; corrected by {CALIBRATION_FOLDS}-fold cross-validation"
    return Outcome([fit_table(fit, ("raw", "corrected"), [note], fit)])
