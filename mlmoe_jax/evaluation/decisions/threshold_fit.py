"""Fit the thresholds of a run to the reported scores of a validation split, as `config.thresholds` says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.multilabel import precision_recall_f1
from mlmoe_jax.evaluation.metrics.threshold_search import best_thresholds, least_to_bound
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores
from mlmoe_jax.models.attributes import AttributeSoftmax
from mlmoe_jax.runs.decisions import Thresholds
from mlmoe_jax.runtime.array_types import Bools, Floats, Ints

# Labels with fewer positive images share one threshold. Otherwise one positive image with a low score could lead to a
# threshold at which a label is predicted almost everywhere.
LEAST_OWN_POSITIVES = 10


def split_to_fit(config: ConfigDict, *, trained: bool = True) -> str:
    """Return the name of the split on which thresholds and calibrations are fitted.

    It is `thresholds.split`. If this key is "", it is the validation split, or with `train.fit=logistic` the training
    split with out-of-fold scores. A warning is logged if it is the training split, unless `trained` is False: the
    scores of an untrained model are not better there. Raises UserError if there is no such split, or if it is one of
    `data.test_splits`.
    """
    default = OUT_OF_FOLD if config.train.fit == "logistic" else config.data.val_split
    split = config.thresholds.split or default
    if not split:
        raise UserError(
            "the run has no validation split to fit on; name one with --config.thresholds.split, or train with "
            "data.val_fraction"
        )
    if split in config.data.test_splits:
        raise UserError(
            f"nothing can be fitted on {split}, one of data.test_splits, because its reported metrics would be too "
            "good; name another split with --config.thresholds.split"
        )
    if trained and split == config.data.train_split:
        logging.getLogger(__name__).warning(
            "the model was trained on %s, and its scores there are better than on other images", split
        )
    return split


def fit_thresholds(
    table: SplitScores,
    names: Sequence[str],
    config: ConfigDict,
    stored: Thresholds | None = None,
    categories: Mapping[str, Ints] = MappingProxyType({}),
    tree: LabelTree = INDEPENDENT,
) -> Thresholds:
    """Fit thresholds to the images of a split that have scores; see `threshold_search.best_thresholds`.

    With one threshold per label, labels with fewer than LEAST_OWN_POSITIVES positives share one threshold. It is fitted
    to the entries of all labels together. For the goal "miss_rate", the labels with too few positives for the bound
    also share this threshold. It is then fitted to the entries of only these labels, and is 0 if they have too few
    images. With one threshold per category, these rules are about the labels of a category together; `categories` maps
    each to the indices of its labels.

    The calibration of the `stored` thresholds, if there are any, is applied to the raw scores before the fit, and is
    part of the result. Values of the attributes of `tree` have no threshold: `eval.threshold` is written for them, and
    they are in none of the numbers. `Thresholds.source` describes the fit. Its entries `before` and `after` are the
    results of `multilabel.precision_recall_f1` at `eval.threshold` and at the fitted thresholds. Raises UserError if no
    label has a positive, or no threshold reaches the goal.
    """
    table, settings = table.readable(), config.thresholds
    calibrated = Thresholds({}, calibration={} if stored is None else stored.calibration)
    scores = calibrated.correct(table.scores, names, tree.consistent(False))
    entries = Entries.of(scores, table.codes, config.data.difficult_eval)
    is_value = AttributeSoftmax.of(tree.attributes, len(names)).is_value
    entries = replace(entries, valid=entries.valid & ~is_value)
    least = _least_positives(table, entries, settings)
    thresholds, few = _search_all(replace(entries, categories=categories), settings, least)
    if not is_value.all():
        _require_reached(table, thresholds, config)
    thresholds, few = np.where(is_value, config.eval.threshold, thresholds), few & ~is_value
    source = {
        "split": table.name,
        "images": len(table),
        "per": settings.per,
        "goal": settings.goal,
        **_level(settings),
        "least_positives": least,
        "shared": [names[k] for k in np.flatnonzero(few)],
        **_compare(entries, config.eval.threshold, thresholds),
    }
    return Thresholds(dict(zip(names, thresholds.tolist(), strict=True)), source, calibrated.calibration)


def _compare(entries: Entries, fixed: float, fitted: Floats) -> dict[str, Any]:
    """Return the metrics `before` and `after` the fit, at the threshold `fixed` and at the fitted ones."""
    predicted = {"before": entries.scores >= fixed, "after": entries.scores >= fitted}
    measured = {name: precision_recall_f1(one, entries.positive, mask=entries.valid) for name, one in predicted.items()}
    return {"fixed": fixed, **measured}


def _level(settings: ConfigDict) -> dict[str, float]:
    """Return {goal: its value}, such as {"precision": 0.9}; {} for the goal "f1", which has no value."""
    return {} if settings.goal == "f1" else {settings.goal: settings[settings.goal]}


def _search_all(entries: Entries, settings: ConfigDict, least: int) -> tuple[Floats, Bools]:
    """Return the thresholds f64[K], and which labels share one threshold, bool[K].

    With one threshold per label or category, those with fewer than `least` positives share one. With `settings.per`
    "global", all thresholds are equal, and the flags are False.
    """

    def search(labels: Bools | Ints, per: str) -> Floats:
        scores, positive, valid = (x[:, labels] for x in (entries.scores, entries.positive, entries.valid))
        return best_thresholds(scores, positive, mask=valid, per=per, goal=settings.goal, **_level(settings))

    every = np.ones(entries.scores.shape[1], bool)
    positives = (entries.positive & entries.valid).sum(axis=0)
    if settings.per == "category":
        thresholds = np.full(len(every), np.nan)
        for labels in entries.categories.values():
            thresholds[labels] = search(labels, "global")
            positives[labels] = positives[labels].sum()
    else:
        thresholds = search(every, settings.per)
    few = (positives < least) | np.isnan(thresholds)
    if settings.per == "global" or not few.any():
        return thresholds, np.zeros_like(every)
    if settings.goal == "miss_rate":
        shared = np.nan_to_num(search(few, "global")[0], nan=0.0)
    else:
        shared = search(every, "global")[0]
    return np.where(few, shared, thresholds), few


def _require_reached(table: SplitScores, thresholds: Floats, config: ConfigDict) -> None:
    """Raise UserError if no label has a positive, or if the thresholds of all labels are infinite or nan."""
    if np.isnan(thresholds).all():
        raise UserError(f"no label has a positive among the {len(table):,} images of {table.name} that have scores")
    if not np.isfinite(thresholds).any():
        raise UserError(
            f"a precision of {config.thresholds.precision:g} is not reached on {table.name} by any label at any "
            "threshold; lower --config.thresholds.precision"
        )


def _least_positives(table: SplitScores, entries: Entries, settings: ConfigDict) -> int:
    """Return the fewest positives of a label with a threshold of its own.

    Raises UserError if a split has too few images with a present label to bound the miss rate by `miss_rate`.
    """
    if settings.goal != "miss_rate":
        return LEAST_OWN_POSITIVES
    images = int((entries.positive & entries.valid).any(axis=1).sum())
    least = least_to_bound(settings.miss_rate)
    if images < least:
        raise UserError(
            f"a miss rate of {settings.miss_rate:g} needs {least:,} images with a label, and {table.name} has "
            f"{images:,}; raise --config.thresholds.miss_rate, or fit on more images"
        )
    return max(LEAST_OWN_POSITIVES, least)
