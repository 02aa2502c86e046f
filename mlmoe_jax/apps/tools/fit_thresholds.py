"""`--mode=thresholds`: fit the thresholds of a run to its stored scores, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds, split_to_fit
from mlmoe_jax.evaluation.results import SplitScores, read_labels, read_scores, require_split
from mlmoe_jax.runs.folder import CONFIG, THRESHOLDS, RunFolder, read_config
from mlmoe_jax.runs.thresholds import Thresholds, stored_thresholds, write_thresholds
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import abbreviate, percent, quantity

_GOALS = {"f1": "best F1", "precision": "precision of", "miss_rate": "expected misses of at most"}


def fit_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = ()) -> Outcome:
    """Fit the thresholds of a run according to `config.thresholds`, and write thresholds.json.

    The scores are corrected by the calibration of the run, if there is one.

    Args:
      folder: the run folder.
      overrides: keys under thresholds that differ from the run; a precision or a miss rate without a goal sets the goal
        too.

    Returns:
      the metrics before and after the fit, for the command line.

    Raises:
      UserError: the split is reported or has no scores, or no threshold reaches the goal.
    """
    keys = {key.removeprefix("thresholds.") for key, _ in overrides}
    levels = keys & {"precision", "miss_rate"}
    if "goal" not in keys and len(levels) == 1:
        overrides = [*overrides, ("thresholds.goal", *levels)]
    config, table, names = open_split_to_fit(folder, overrides)
    thresholds = fit_thresholds(table, names, config, stored_thresholds(folder))
    with folder.writing():
        write_thresholds(folder, thresholds)
    status(f"written to {folder / THRESHOLDS}, which --mode=predict uses")
    document = {**thresholds.source, "thresholds": thresholds.values}
    headings = (f"{config.eval.threshold:g}", "fitted")
    return Outcome([fit_table(thresholds.source, headings, fitted_lines(thresholds), document)])


def open_split_to_fit(
    folder: RunFolder, overrides: Sequence[tuple[str, str]]
) -> tuple[ConfigDict, SplitScores, tuple[str, ...]]:
    """Return the config of a run with `overrides`, the scores of its split to fit on, and the labels.

    Raises UserError for keys that are not about thresholds or calibration, and if the split is reported or has no
    scores.
    """
    folder.require(CONFIG)
    config = read_config(folder)
    for key, _ in overrides:
        if not key.startswith(("thresholds.", "calibration.")):
            raise UserError(f"--config.{key} cannot be set here; only keys under thresholds and calibration can")
    configuration.apply_overrides(config, list(overrides))
    configuration.validate(config)
    table = require_split(folder, read_scores(folder), split_to_fit(config))
    return config, table, read_labels(folder)


def fit_table(fit: Mapping[str, Any], headings: tuple[str, str], notes: list[str], document: Any) -> Table:
    """Return the metrics before and after a fit in percent.

    Args:
      fit: `Thresholds.source`, or a calibration.
      headings: names of the metrics before and after.
      notes: lines below the table.
      document: the table as JSON.
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
    """Return the goal of fitted thresholds with their range, and the labels without their own threshold."""
    source = thresholds.source
    finite = [value for value in thresholds.values.values() if np.isfinite(value)]
    goal, level = _GOALS[source["goal"]], source.get(source["goal"])
    if level is not None:
        goal += f" {100 * level:g} %"
    per = "one for all labels" if source["per"] == "global" else "one per label"
    lines = [
        f"{goal}, {per}, on {quantity(source['images'], 'image')}: {min(finite):.3f} to {max(finite):.3f}, median "
        f"{np.median(finite):.3f}"
    ]
    if source["shared"]:
        few = f"with fewer than {source['least_positives']} positive images share one threshold"
        lines.append(f"labels {few}: {abbreviate(source['shared'])}")
    if always := [name for name, value in thresholds.values.items() if value == 0]:
        lines.append(f"labels always predicted, since no higher threshold has the bound: {abbreviate(always)}")
    if never := [name for name, value in thresholds.values.items() if np.isinf(value)]:
        lines.append(f"labels never that precise, so never predicted: {abbreviate(never)}")
    return lines
