"""The split to whose scores thresholds and calibrations are fitted."""

from __future__ import annotations

import logging

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores


def split_to_fit(config: ConfigDict) -> str:
    """Return the split to fit thresholds and calibrations on.

    Raises UserError if there is none, or if its metrics are reported.
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
    return split


def warn_if_trained_on(table: SplitScores, config: ConfigDict) -> None:
    """Log a warning if a split to fit on is the training split."""
    if table.name == config.data.train_split:
        logging.getLogger(__name__).warning(
            "the model was trained on %s, and its scores there are better than on other images", table.name
        )
