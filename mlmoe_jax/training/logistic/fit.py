"""`train.fit=logistic`: fit the linear classifier of a run by logistic regression on its cached features."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Float32

from mlmoe_jax.data.features import FeatureTable
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.twins import join_twins
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.runs.folder import training_finished
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.array_types import Bools
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import copy_tree
from mlmoe_jax.training.experiment import Experiment
from mlmoe_jax.training.logistic.penalty_search import LogisticFit, Origin, fit_logistic
from mlmoe_jax.training.profiling import Window
from mlmoe_jax.training.resume import save_progress
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.step import TrainState

_logger = logging.getLogger(__name__)

KERNEL, BIAS = "head/classifier/kernel", "head/classifier/bias"


def require_only_classifier(trainable: Collection[str], profile: Window | None) -> None:
    """Raise UserError unless exactly the linear classifier is `trainable` (paths), and profiling is off."""
    if other := sorted({KERNEL, BIAS} ^ set(trainable)):
        raise UserError(
            f"train.fit=logistic trains the linear classifier and nothing else, but config.trainable differs "
            f"in {other[0]}; set train.fit=steps"
        )
    if profile is not None:
        raise UserError("--profile traces steps, and train.fit=logistic has no steps; leave out one of the two")


def fit_classifier(
    experiment: Experiment, state: TrainState, selection: Selection, manager: ocp.CheckpointManager
) -> SplitScores:
    """Fit the classifier, save it as a checkpoint, and return cross-validated scores of the training images.

    The score of an image is computed by the classifier that was fitted without the fold of the image. If the run is
    finished, nothing is fitted, and the stored scores are returned. Otherwise the fitted values become the values of
    `selection`. Every process computes the whole fit. If the label space has vectors of label names, these give
    classifiers, which are the `origin` of `fit_logistic`.
    """
    if int(state.step) and training_finished(experiment.folder):
        return StoredRun(experiment.folder).split(OUT_OF_FOLD)
    config, split = experiment.config, experiment.data.train_split
    features, read = split.features.readable()
    readable = join_twins(split.take(np.flatnonzero(read), split.name), config.data, features)
    features = _classified(experiment, state, split.features, features)
    names = experiment.data.label_space.name_vectors
    origin = None if names is None else Origin(names.kernel(), names.offsets())
    experiment.data.skipped.rows.update(np.flatnonzero(~read).tolist())
    status(f"fitting {len(split.classes):,} labels on {len(features):,} images by logistic regression")
    fit = fit_logistic(
        features,
        readable.labels,
        difficult=config.data.difficult_train,
        seed=config.seed,
        units=readable.units,
        origin=origin,
        attributes=split.tree.attributes,
    )
    if origin is not None:
        drawn = "the vectors of the names" if fit.origin is origin else "0, which has less log loss than the names"
        status(f"the fit is drawn towards {drawn}; labels without images keep the scores of their names")
    status(f"C={fit.penalty:.3g} has the least log loss, {fit.losses[fit.penalty]:.4f} out of fold")
    if doubt := fit.doubt():
        _logger.warning(doubt)
    _save_classifier(experiment, state, selection, manager, fit)
    return _held_out_scores(split, read, readable, fit)


def _held_out_scores(split: Split, read: Bools, readable: Split, fit: LogisticFit) -> SplitScores:
    """Return the cross-validated scores of a split, whose rows `read` bool[N] are the images of `readable`."""
    if readable.groups is not None:
        groups = np.full(len(split), "", object)
        groups[read] = readable.groups
        split = replace(split, groups=groups.tolist())
    scores = np.full(split.labels.shape, np.nan, np.float32)
    scores[read] = fit.held_out_scores
    return replace(SplitScores.of(split, scores), name=OUT_OF_FOLD, source=None)


def _classified(
    experiment: Experiment, state: TrainState, table: FeatureTable, features: Float32[np.ndarray, "n d"]
) -> Float32[np.ndarray, "n _"]:
    """Return `image_vectors` of the head, the inputs of its classifier, for `features` of the kind of `table`."""
    definition, (kind,) = experiment.steps.definition, table.kinds
    frozen = {path: value for path, value in state.frozen.items() if path.startswith("head/")}
    head = definition.merge(definition.shapes(), distributed.to_host(frozen)).head
    return np.asarray(head.image_vectors(Features.from_arrays({kind: jnp.asarray(features)})))


def _save_classifier(
    experiment: Experiment,
    state: TrainState,
    selection: Selection,
    manager: ocp.CheckpointManager,
    fit: LogisticFit,
) -> None:
    """Select the fitted classifier, and save it in a checkpoint as the only step of the training."""
    values = experiment.steps.place({KERNEL: jnp.asarray(fit.kernel), BIAS: jnp.asarray(fit.bias)})
    state = state.replace(step=state.step + 1, trainable=values)
    state = state.replace(ema=copy_tree(state.raw()) if state.ema else {})
    selection.keep(1, "raw", "", copy_tree(state.raw()))
    save_progress(experiment, manager, 1, state, selection)
