"""`--mode=thresholds`, and the end of a training: fit thresholds to scores of a validation split, without a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.multilabel import precision_recall_f1
from mlmoe_jax.evaluation.results import SplitScores, read_labels, read_scores, require_split
from mlmoe_jax.evaluation.thresholds import fit
from mlmoe_jax.runs.folder import CONFIG, THRESHOLDS, RunFolder
from mlmoe_jax.runs.restore import read_config
from mlmoe_jax.runs.thresholds import Thresholds, write_thresholds
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import to_json
from mlmoe_jax.runtime.text import some, text_table

_SHOWN = 10  # names in a sentence


def fit_run(folder: RunFolder, overrides: Sequence[tuple[str, str]] = (), *, as_json: bool = False) -> int:
    """Fit the thresholds of a run according to `config.thresholds`, write thresholds.json and print the changes.

    overrides: keys under thresholds that differ from those of the run. Returns the exit code. Raises UserError for a
    reported split, for a split without scores, and if no threshold reaches the goal.
    """
    folder.require(CONFIG)
    config = read_config(folder)
    for key, _ in overrides:
        if not key.startswith("thresholds."):
            raise UserError(f"--config.{key} cannot be set for --mode=thresholds; only keys under thresholds can")
    configuration.apply_overrides(config, list(overrides))
    configuration.validate(config)
    table = require_split(folder, read_scores(folder), split_to_fit(config))
    thresholds = fit_as_configured(table, read_labels(folder), config)
    with folder.writing():
        write_thresholds(folder, thresholds)
    report = {**thresholds.source, "thresholds": thresholds.values}
    print(to_json(report, indent=2) if as_json else format_fitted(thresholds))
    status(f"written to {folder / THRESHOLDS}, which --mode=predict uses")
    return 0


def split_to_fit(config: ConfigDict) -> str:
    """Return the split that `thresholds.split` names; UserError if there is none, or if it is a reported one."""
    split = config.thresholds.split or config.data.val_split
    if not split:
        raise UserError(
            "the run has no validation split to fit thresholds on; name one with --config.thresholds.split, or train "
            "with data.val_fraction"
        )
    if split in config.data.test_splits:
        raise UserError(
            f"thresholds are not fitted on {split}, one of data.test_splits, because its reported metrics would be too "
            "high; name another with --config.thresholds.split"
        )
    return split


def fit_as_configured(table: SplitScores, names: Sequence[str], config: ConfigDict) -> Thresholds:
    """Fit thresholds as `config.thresholds` says to the scores of a split; warnings and errors as in `fit_run`."""
    settings = config.thresholds
    if table.name == config.data.train_split:
        status(f"warning: the model was trained on {table.name}, and its scores there are better than on other images")
    return fit_split(
        table,
        names,
        per=settings.per,
        goal=settings.goal,
        precision=settings.precision,
        least_positives=settings.least_positives,
        difficult=config.data.difficult_eval,
        fixed=config.eval.threshold,
    )


def fit_split(
    table: SplitScores,
    names: Sequence[str],
    *,
    per: str,
    goal: str,
    precision: float,
    least_positives: int,
    difficult: str,
    fixed: float,
) -> Thresholds:
    """Fit thresholds to the images of a split that have scores, see `thresholds.fit`.

    Labels with fewer positives than `least_positives` share the threshold that is fitted to all labels together: one
    positive image with a low score would otherwise let a label be predicted almost everywhere. The source describes the
    fit, with the results of `metrics.precision_recall_f1` at the `fixed` and at the fitted thresholds. Raises UserError
    if no label can be fitted.
    """
    table = table.take(table.read)
    label, mask = table.targets(difficult)
    fitted = functools.partial(fit, table.scores, label, mask=mask, goal=goal, precision=precision)
    cuts = fitted(per=per)
    few = ((label == 1) & (mask != 0)).sum(axis=0) < (least_positives if per == "class" else 0)
    if few.any():
        cuts = np.where(few, fitted(per="global"), cuts)
    if np.isnan(cuts).all():
        raise UserError(f"no label has a positive among the {len(table):,} images of {table.name} that have scores")
    if not np.isfinite(cuts).any():
        raise UserError(
            f"a precision of {precision:g} is not reached on {table.name} by any label at any threshold; lower "
            "--config.thresholds.precision"
        )
    before, after = (precision_recall_f1(table.scores >= at, label, mask=mask) for at in (fixed, cuts))
    source = {
        "split": table.name,
        "images": len(table),
        "per": per,
        "goal": goal,
        **({"precision": precision} if goal == "precision" else {}),
        "fixed": fixed,
        "least_positives": least_positives,
        "shared": [name for name, is_few in zip(names, few, strict=True) if is_few],
        "never": [name for name, cut in zip(names, cuts, strict=True) if np.isposinf(cut)],
        "before": before,
        "after": after,
    }
    return Thresholds(dict(zip(names, cuts.tolist(), strict=True)), source)


def format_fitted(thresholds: Thresholds) -> str:
    """Return the metrics before and after in percent, and the labels that could not be fitted."""
    source, count = thresholds.source, len(thresholds.values)
    rows = [[f"{source['split']}, %", f"{source['fixed']:g}", "fitted"]]
    for name, before in source["before"].items():
        rows.append([name, f"{100 * before:.2f}", f"{100 * source['after'][name]:.2f}"])
    lines = [text_table(rows, least=(10, 8))]
    finite = [value for value in thresholds.values.values() if np.isfinite(value)]
    goal = "best F1" if source["goal"] == "f1" else f"precision of {100 * source['precision']:g} %"
    one = "one for all labels" if source["per"] == "global" else "one per label"
    lines.append(
        f"{goal}, {one}, on {source['images']:,} images: {min(finite):.3f} to {max(finite):.3f}, median "
        f"{np.median(finite):.3f}"
    )
    for key, what in (
        ("shared", f"with fewer than {source['least_positives']} positive images, sharing one threshold"),
        ("never", "never that precise, so never predicted"),
    ):
        if source[key]:
            lines.append(f"{len(source[key])} of {count} labels {what}: {some(source[key], _SHOWN)}")
    return "\n".join(lines)
