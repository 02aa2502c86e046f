"""`--mode=thresholds`: fit the thresholds of a run to its stored scores, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.errors import DONE, UserError
from mlmoe_jax.evaluation.fit_thresholds import fit_split, split_to_fit
from mlmoe_jax.evaluation.results import read_labels, read_scores, require_split
from mlmoe_jax.runs.folder import CONFIG, THRESHOLDS, RunFolder, read_config
from mlmoe_jax.runs.thresholds import Thresholds, write_thresholds
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import percent, quantity, some, text_table

_SHOWN = 10  # names in a sentence


def fit_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = (), *, as_json: bool = False) -> int:
    """Fit the thresholds of a run according to `config.thresholds`, write thresholds.json and print the changes.

    `overrides` has keys under thresholds that differ from the run. Returns the exit code. Raises UserError if the split
    is reported or has no scores, or if no threshold reaches the goal.
    """
    folder.require(CONFIG)
    config = read_config(folder)
    for key, _ in overrides:
        if not key.startswith("thresholds."):
            raise UserError(f"--config.{key} cannot be set for --mode=thresholds; only keys under thresholds can")
    configuration.apply_overrides(config, list(overrides))
    configuration.validate(config)
    table = require_split(folder, read_scores(folder), split_to_fit(config))
    thresholds = fit_split(table, read_labels(folder), config)
    with folder.writing():
        write_thresholds(folder, thresholds)
    report = {**thresholds.source, "thresholds": thresholds.values}
    print(to_json(report, indent=2) if as_json else format_fitted(thresholds))
    status(f"written to {folder / THRESHOLDS}, which --mode=predict uses")
    return DONE


def format_fitted(thresholds: Thresholds) -> str:
    """Return the metrics before and after in percent, the goal, and the labels that could not be fitted."""
    source = thresholds.source
    rows = [[f"{source['split']}, %", f"{source['fixed']:g}", "fitted"]]
    rows += [[name, percent(before), percent(source["after"][name])] for name, before in source["before"].items()]
    return "\n".join([text_table(rows, least=(10, 8)), *fitted_lines(thresholds)])


def fitted_lines(thresholds: Thresholds) -> list[str]:
    """Return the goal of fitted thresholds with their range, and the labels without their own threshold."""
    source = thresholds.source
    finite = [value for value in thresholds.values.values() if np.isfinite(value)]
    goal = "best F1" if source["goal"] == "f1" else f"precision of {100 * source['precision']:g} %"
    one = "one for all labels" if source["per"] == "global" else "one per label"
    lines = [
        f"{goal}, {one}, on {quantity(source['images'], 'image')}: {min(finite):.3f} to {max(finite):.3f}, median "
        f"{np.median(finite):.3f}"
    ]
    for key, what in (
        ("shared", f"with fewer than {source.get('least_positives')} positive images, sharing one threshold"),
        ("never", "never that precise, so never predicted"),
    ):
        if source.get(key):
            count = quantity(len(thresholds.values), "label")
            lines.append(f"{len(source[key])} of {count} {what}: {some(source[key], _SHOWN)}")
    return lines
