"""The prior of labels, `loss.prior`: estimated by a first training, or read from a file."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.files import damage_explained, read_text


def read_prior(config: ConfigDict, names: Sequence[str]) -> Float32[np.ndarray, " k"] | None:
    """Read `loss.prior` for the labels `names`; None if the key is empty.

    The prior of a label is its mean probability over the training images, by a model that was trained with
    `loss.unknown=ignore` (CSL). The authors' code averages the probabilities of all epochs of this training instead.
    `loss.prior` is the folder of a run with such a model, or a CSV file with label and prior in each line. The header
    of the file, and lines without a comma, are ignored. Raises UserError if the run has no scores of the training
    split, the file is damaged, or a label has no prior.
    """
    place, split = config.loss.prior, config.data.train_split
    if not place:
        return None
    if place.endswith(".csv"):
        with damage_explained(place):
            lines = csv.reader(read_text(place).splitlines())
            priors = {row[0]: float(row[1]) for row in list(lines)[1:] if len(row) > 1}
    else:
        run = StoredRun(RunFolder(place))
        if split not in run.scored_splits:
            command = f"mlmoe eval --workdir={place} --config.data.test_splits={split}"
            raise UserError(f"loss.prior={place} has no scores of the split {split}: run {command}")
        priors = dict(zip(run.labels, run.split(split).readable().scores.mean(axis=0), strict=True))
    if missing := [name for name in names if name not in priors]:
        raise UserError(f"loss.prior={place} has no prior for {len(missing):,} labels, the first is {missing[0]}")
    return np.asarray([priors[name] for name in names], np.float32)
