"""Fit the thresholds of a run to the scores of a validation split, as `config.thresholds` says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.multilabel import precision_recall_f1
from mlmoe_jax.evaluation.metrics.thresholds import fit
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.progress import status

# Labels with fewer positive images share one threshold. Otherwise one positive image with a low score could lead to a
# threshold at which a label is predicted almost everywhere.
LEAST_POSITIVES = 10


def split_to_fit(config: ConfigDict) -> str:
    """Return the split of `thresholds.split`; UserError if there is none, or if its metrics are reported."""
    default = OUT_OF_FOLD if config.train.fit == "logistic" else config.data.val_split
    split = config.thresholds.split or default
    if not split:
        raise UserError(
            "the run has no validation split to fit thresholds on; name one with --config.thresholds.split, or train "
            "with data.val_fraction"
        )
    if split in config.data.test_splits:
        raise UserError(
            f"thresholds are not fitted on {split}, one of data.test_splits, because its reported metrics would be too "
            "high; name another split with --config.thresholds.split"
        )
    return split


def fit_split(table: SplitScores, names: Sequence[str], config: ConfigDict) -> Thresholds:
    """Fit thresholds to the images of a split that have scores, see `thresholds.fit`.

    With one threshold per label, labels with fewer than LEAST_POSITIVES positives share a threshold that is fitted to
    all labels together.

    `Thresholds.source` of the result describes the fit, with the results of `multilabel.precision_recall_f1` at the
    fixed and at the fitted thresholds. Raises UserError if no label has a positive, or no threshold reaches the goal.
    """
    settings, fixed = config.thresholds, config.eval.threshold
    if table.name == config.data.train_split:
        status(f"warning: the model was trained on {table.name}, and its scores there are better than on other images")
    table = table.readable()
    label, mask = table.targets(config.data.difficult_eval)
    goal = {"mask": mask, "goal": settings.goal, "precision": settings.precision}
    thresholds, few = fit(table.scores, label, per=settings.per, **goal), np.zeros(len(names), bool)
    if settings.per == "class":
        few = ((label == 1) & (mask != 0)).sum(axis=0) < LEAST_POSITIVES
        thresholds = (
            np.where(few, fit(table.scores, label, per="global", **goal), thresholds) if few.any() else thresholds
        )
    if np.isnan(thresholds).all():
        raise UserError(f"no label has a positive among the {len(table):,} images of {table.name} that have scores")
    if not np.isfinite(thresholds).any():
        raise UserError(
            f"a precision of {settings.precision:g} is not reached on {table.name} by any label at any threshold; "
            "lower --config.thresholds.precision"
        )
    before, after = (precision_recall_f1(table.scores >= at, label, mask=mask) for at in (fixed, thresholds))
    source = {
        "split": table.name,
        "images": len(table),
        "per": settings.per,
        "goal": settings.goal,
        **({"precision": settings.precision} if settings.goal == "precision" else {}),
        "fixed": fixed,
        "least_positives": LEAST_POSITIVES,
        "shared": [name for name, is_few in zip(names, few, strict=True) if is_few],
        "never": [name for name, threshold in zip(names, thresholds, strict=True) if np.isposinf(threshold)],
        "before": before,
        "after": after,
    }
    return Thresholds(dict(zip(names, thresholds.tolist(), strict=True)), source)
