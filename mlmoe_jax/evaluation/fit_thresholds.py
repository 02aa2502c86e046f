"""Fit the thresholds of a run to the scores of a validation split, as `config.thresholds` says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.multilabel import precision_recall_f1
from mlmoe_jax.evaluation.metrics.threshold_search import fit, least_to_bound
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.progress import status

# Labels with fewer positive images share one threshold. Otherwise one positive image with a low score could lead to a
# threshold at which a label is predicted almost everywhere.
LEAST_POSITIVES = 10


def split_to_fit(config: ConfigDict, section: str = "thresholds") -> str:
    """Return the split to fit the thresholds or the calibration on: `split` of a section of the config.

    Raises UserError if there is none, or if its metrics are reported.
    """
    default = OUT_OF_FOLD if config.train.fit == "logistic" else config.data.val_split
    split = config[section].split or default
    if not split:
        raise UserError(
            f"the run has no validation split to fit {section} on; name one with --config.{section}.split, or train "
            "with data.val_fraction"
        )
    if split in config.data.test_splits:
        raise UserError(
            f"{section} cannot be fitted on {split}, one of data.test_splits, because its reported metrics would be "
            f"too good; name another split with --config.{section}.split"
        )
    return split


def fit_split(table: SplitScores, names: Sequence[str], config: ConfigDict) -> Thresholds:
    """Fit thresholds to the images of a split that have scores, see `thresholds.fit`.

    With one threshold per label, labels with fewer than LEAST_POSITIVES positives share a threshold that is fitted to
    all labels together. With goal="miss_rate" these are also the labels with too few positives for the bound, and they
    share a threshold that is fitted to their own misses; it is 0 if their images are too few.

    `Thresholds.source` of the result describes the fit, with the results of `multilabel.precision_recall_f1` at the
    fixed and at the fitted thresholds. Raises UserError if no label has a positive, or no threshold reaches the goal.
    """
    settings, fixed = config.thresholds, config.eval.threshold
    warn_if_trained_on(table, config)
    table = table.readable()
    entries = table.entries(config.data.difficult_eval)
    label, mask = entries.positive, entries.valid
    level = {settings.goal: settings[settings.goal]} if settings.goal != "f1" else {}
    goal, least, bounded = {"goal": settings.goal, **level}, LEAST_POSITIVES, settings.goal == "miss_rate"
    if bounded:
        least = max(least, least_to_bound(settings.miss_rate))
        require_enough(table, label & mask, settings.miss_rate)
    thresholds, few = fit(table.scores, label, mask=mask, per=settings.per, **goal), np.zeros(len(names), bool)
    if settings.per == "class":
        few = (label & mask).sum(axis=0) < least
    if few.any():
        pool = few if bounded else np.ones_like(few)
        shared = fit(table.scores[:, pool], label[:, pool], mask=mask[:, pool], per="global", **goal)[0]
        thresholds = np.where(few, np.nan_to_num(shared, nan=0.0) if bounded else shared, thresholds)
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
        **level,
        "fixed": fixed,
        "least_positives": least,
        "shared": [name for name, is_few in zip(names, few, strict=True) if is_few],
        "always": [name for name, threshold in zip(names, thresholds, strict=True) if bounded and threshold == 0],
        "never": [name for name, threshold in zip(names, thresholds, strict=True) if np.isposinf(threshold)],
        "before": before,
        "after": after,
    }
    return Thresholds(dict(zip(names, thresholds.tolist(), strict=True)), source)


def warn_if_trained_on(table: SplitScores, config: ConfigDict) -> None:
    """Print a warning if a split to fit on is the training split."""
    if table.name == config.data.train_split:
        status(f"warning: the model was trained on {table.name}, and its scores there are better than on other images")


def require_enough(table: SplitScores, positive: np.ndarray, miss_rate: float) -> None:
    """Raise UserError if a split has too few images with a label, bool[N,K], for a bound on the misses."""
    images, least = int(positive.any(axis=1).sum()), least_to_bound(miss_rate)
    if images < least:
        raise UserError(
            f"a miss rate of {miss_rate:g} needs {least:,} images with a label, and {table.name} has {images:,}; raise "
            "--config.thresholds.miss_rate, or fit on more images"
        )
