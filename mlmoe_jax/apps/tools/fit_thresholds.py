"""Fit the thresholds or the calibration of a run to its stored scores, without running the model.

These are the commands `mlmoe thresholds` and `mlmoe calibrate`.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config.table import keys_read
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.decisions.calibration_fit import CALIBRATION_FOLDS, fit_calibration
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds, split_to_fit
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.decisions import Thresholds, write_thresholds
from mlmoe_jax.runs.folder import THRESHOLDS, RunFolder
from mlmoe_jax.runs.image_record import warn_of_leak
from mlmoe_jax.runs.shared_model import is_untrained, read_origin
from mlmoe_jax.runtime.keys import KeyValues
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import InUse
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import abbreviate, percent, quantity

_PER = {"class": "one per label", "category": "one per category", "global": "one for all labels"}
_GOALS = {"f1": "best F1", "precision": "precision of", "miss_rate": "expected misses of at most"}


def fit_run(folder: RunFolder, overrides: KeyValues = ()) -> Outcome:
    """Fit the thresholds of a run according to `config.thresholds`, and write them to thresholds.json.

    The thresholds are fitted to the calibrated scores, if the run has a calibration. `overrides` are pairs of key and
    text, for keys of the stage `fit`. If `thresholds.precision` or `thresholds.miss_rate` is given and
    `thresholds.goal` is not, the given key is also the goal. The returned table has the metrics before and after the
    fit.

    Raises:
      UserError: the split to fit on is one of the test splits whose metrics the run reports, the split has no stored
        scores, or no threshold reaches the goal.
    """
    keys = {key.removeprefix("thresholds.") for key, _ in overrides}
    levels = keys & {"precision", "miss_rate"}
    if "goal" not in keys and len(levels) == 1:
        overrides = [*overrides, ("thresholds.goal", *levels)]
    with changing_thresholds(folder) as run:
        config, table = open_split_to_fit(run, overrides, "fit")
        thresholds = fit_thresholds(table, run.labels, config, run.thresholds, run.categories, run.tree)
        write_thresholds(folder, thresholds)
    status(f"written to {folder / THRESHOLDS}, which mlmoe predict uses")
    document = {**thresholds.source, "thresholds": thresholds.values}
    headings = (f"{config.eval.threshold:g}", "fitted")
    return Outcome([fit_table(thresholds.source, headings, fitted_lines(thresholds), document)])


def calibrate_run(folder: RunFolder, overrides: KeyValues = ()) -> Outcome:
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
        calibrated = replace(stored, calibration=fit_calibration(table, run.labels, config, run.tree.attributes))
        if stored.source:
            goal = {key: key.rpartition(".")[2] for key in keys_read("fit")}
            config.update_from_flattened_dict(
                {key: stored.source[name] for key, name in goal.items() if name in stored.source}
            )
            fitted_on = run.split(stored.source["split"])
            calibrated = fit_thresholds(fitted_on, run.labels, config, calibrated, run.categories, run.tree)
            status("the thresholds were fitted to other scores, and are fitted again to the corrected ones")
        write_thresholds(folder, calibrated)
    status(f"written to {folder / THRESHOLDS}, which mlmoe predict, serve and export use")
    fit = calibrated.calibration
    images = quantity(fit["images"], "image")
    note = f"{fit['method']}, on {images}; corrected by {CALIBRATION_FOLDS}-fold cross-validation"
    return Outcome([fit_table(fit, ("raw", "corrected"), [note], fit)])


@contextlib.contextmanager
def changing_thresholds(folder: RunFolder) -> Iterator[StoredRun]:
    """Yield the run in a folder, and hold the lock of its results while the context is active.

    Write the new thresholds inside the context. Raises UserError if the folder has no results, or if a training is
    writing to it, because the end of the training would replace the thresholds.
    """
    StoredRun(folder).require_results()
    with folder.changing_results():  # a training that starts from here on waits for the lock, see `write_fixed`
        if folder.is_in_use():
            raise InUse(f"a training is writing to {folder}, and its end replaces the thresholds; wait for it")
        yield StoredRun(folder)


def open_split_to_fit(run: StoredRun, overrides: KeyValues, stage: str) -> tuple[ConfigDict, SplitScores]:
    """Return the config of a run with `overrides`, pairs of key and text, and the stored scores of the split to fit on.

    `stage` is `fit` or `calibrate`. Raises UserError if the stage does not read a key in `overrides`. Also raises
    UserError if the split to fit on has no stored scores, or is a test split whose metrics the run reports.
    """
    config = run.config
    for key in configuration.find_unread(overrides, (stage,)):
        raise UserError(f"--config.{key} cannot be set here; only {', '.join(keys_read(stage))} can")
    configuration.apply_overrides(config, overrides)
    configuration.validate(config)
    for message in configuration.find_unused(config, overrides):
        logging.getLogger(__name__).warning(message)
    # Only a model with this head can be untrained, and a file of other models can be large.
    origin = read_origin(run.folder) if config.model.head.kind == "cosine" else {}
    trained = not is_untrained(config, origin)
    table = run.split(split_to_fit(config, trained=trained))
    if table.name not in (OUT_OF_FOLD, config.data.train_split):
        warn_of_leak(run.folder, table.name, table.ids.tolist())
    return config, table


def fit_table(fit: Mapping[str, Any], headings: tuple[str, str], notes: list[str], document: Any) -> Table:
    """Return a table of metrics before and after a fit, in percent, with `notes` as lines below it.

    `fit` is `Thresholds.source` or `Thresholds.calibration`: a dict with the keys split (name), before and after
    (metric -> value). `headings` are the headings of the columns before and after. `document` is the value of the table
    in the JSON output.
    """
    before, after = headings
    columns = [
        Column(f"{fit['split']}, %", align="<", width=14),
        Column(before, percent, width=8),
        Column(after, percent, width=8),
    ]
    rows = [[name, value, fit["after"][name]] for name, value in fit["before"].items()]
    return Table(columns, rows, notes=notes, document=document)


def fitted_lines(thresholds: Thresholds) -> list[str]:
    """Return lines of text about fitted thresholds.

    The first has the goal of the fit and the range of the thresholds. Further lines, if any, list the labels that share
    one threshold, the labels that are always predicted, and the labels that are never predicted.
    """
    source = thresholds.source
    finite = [value for value in thresholds.values.values() if np.isfinite(value)]
    goal, level = _GOALS[source["goal"]], source.get(source["goal"])
    if level is not None:
        goal += f" {100 * level:g} %"
    lines = [
        f"{goal}, {_PER[source['per']]}, on {quantity(source['images'], 'image')}: {min(finite):.3f} to "
        f"{max(finite):.3f}, median {np.median(finite):.3f}"
    ]
    if source["shared"]:
        few = f"with fewer than {source['least_positives']} positive images share one threshold"
        lines.append(f"labels {few}: {abbreviate(source['shared'])}")
    if always := [name for name, value in thresholds.values.items() if value == 0]:
        lines.append(f"labels always predicted, since no higher threshold has the bound: {abbreviate(always)}")
    if never := [name for name, value in thresholds.values.items() if np.isinf(value)]:
        lines.append(f"labels never that precise, so never predicted: {abbreviate(never)}")
    return lines
