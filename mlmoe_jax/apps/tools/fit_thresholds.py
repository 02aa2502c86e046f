"""`--mode=thresholds`: fit the thresholds of a run to its stored scores, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.errors import DONE, UserError
from mlmoe_jax.evaluation.fit_thresholds import fit_split, split_to_fit
from mlmoe_jax.evaluation.results import SplitScores, read_labels, read_scores, require_split
from mlmoe_jax.runs.folder import CONFIG, THRESHOLDS, RunFolder, read_config
from mlmoe_jax.runs.thresholds import Thresholds, stored_thresholds, write_thresholds
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import abbreviate, percent, quantity, text_table

_SHOWN = 10  # names in a sentence


def fit_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = (), *, as_json: bool = False) -> int:
    """Fit the thresholds of a run according to `config.thresholds`, write thresholds.json and print the changes.

    `overrides` has keys under thresholds that differ from the run; a precision or a miss rate without a goal sets the
    goal too. Returns the exit code. Raises UserError if the split is reported or has no scores, or if no threshold
    reaches the goal.
    """
    keys = {key.removeprefix("thresholds.") for key, _ in overrides}
    if "goal" not in keys and len(level := keys & {"precision", "miss_rate"}) == 1:
        overrides = [*overrides, ("thresholds.goal", *level)]
    config, table, names = open_split_to_fit(folder, overrides, "thresholds")
    thresholds = fit_split(table, names, config)
    if (stored := stored_thresholds(folder)) is not None:
        thresholds = replace(thresholds, calibration=stored.calibration)
    with folder.writing():
        write_thresholds(folder, thresholds)
    report = {**thresholds.source, "thresholds": thresholds.values}
    print(dump_json(report, indent=2) if as_json else format_fitted(thresholds))
    status(f"written to {folder / THRESHOLDS}, which --mode=predict uses")
    return DONE


def open_split_to_fit(
    folder: RunFolder, overrides: Sequence[tuple[str, str]], section: str
) -> tuple[ConfigDict, SplitScores, tuple[str, ...]]:
    """Return the config of a run with `overrides` of a section, the scores of its split to fit on, and the labels.

    Raises UserError for a key of another section, and if the split is reported or has no scores.
    """
    folder.require(CONFIG)
    config = read_config(folder)
    for key, _ in overrides:
        if not key.startswith(f"{section}."):
            raise UserError(f"--config.{key} cannot be set here; only keys under {section} can")
    configuration.apply_overrides(config, list(overrides))
    configuration.validate(config)
    table = require_split(folder, read_scores(folder), split_to_fit(config, section))
    return config, table, read_labels(folder)


def format_fitted(thresholds: Thresholds) -> str:
    """Return the metrics before and after in percent, the goal, and the labels that could not be fitted."""
    source = thresholds.source
    rows = [[f"{source['split']}, %", f"{source['fixed']:g}", "fitted"]]
    rows += [[name, percent(before), percent(source["after"][name])] for name, before in source["before"].items()]
    return "\n".join([text_table(rows, least=(10, 8)), *fitted_lines(thresholds)])


def fitted_lines(thresholds: Thresholds) -> list[str]:
    """Return the goal of fitted thresholds with their range, and the labels without their own threshold."""
    source = thresholds.source
    finite = [value for value in thresholds.reported.values() if np.isfinite(value)]
    goal = {"f1": "best F1", "precision": "precision of", "miss_rate": "expected misses of at most"}[source["goal"]]
    if (level := source.get(source["goal"])) is not None:
        goal += f" {100 * level:g} %"
    one = "one for all labels" if source["per"] == "global" else "one per label"
    lines = [
        f"{goal}, {one}, on {quantity(source['images'], 'image')}: {min(finite):.3f} to {max(finite):.3f}, median "
        f"{np.median(finite):.3f}"
    ]
    for key, what in (
        ("shared", f"with fewer than {source.get('least_positives')} positive images, sharing one threshold"),
        ("always", "always predicted, since no higher threshold has the bound"),
        ("never", "never that precise, so never predicted"),
    ):
        if source.get(key):
            count = quantity(len(thresholds.values), "label")
            lines.append(f"{len(source[key])} of {count} {what}: {abbreviate(source[key], _SHOWN)}")
    return lines
