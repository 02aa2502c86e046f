"""`train.fit=logistic`: the linear classifier of a run by logistic regression on its cached features."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Bool, Float32

from mlmoe_jax.data.features import FeatureTable
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores, read_scores
from mlmoe_jax.models.apply import probabilities
from mlmoe_jax.runs.folder import SCORES
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.training.logistic import fit_logistic
from mlmoe_jax.training.profiling import Window
from mlmoe_jax.training.resume import save_progress
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.setup import Experiment
from mlmoe_jax.training.step import TrainState, copied

KERNEL, BIAS = "head/classifier/kernel", "head/classifier/bias"


def require_only_classifier(trainable: Collection[str], profile: Window | None) -> None:
    """Raise UserError if the parameters to train are not those of a linear classifier, or if steps are to be traced."""
    if other := sorted({KERNEL, BIAS} ^ set(trainable)):
        raise UserError(
            f"train.fit=logistic finds the values of the linear classifier and no others, but config.trainable differs "
            f"in {other[0]}; set train.fit=steps"
        )
    if profile is not None:
        raise UserError("--profile traces steps, and train.fit=logistic takes none; leave one of them out")


def fit_classifier(
    experiment: Experiment, state: TrainState, selection: Selection, manager: ocp.CheckpointManager
) -> SplitScores:
    """Fit the classifier unless the run is finished, and save it; `selection` then has its values.

    Returns the training images with the scores of the fits that did not see them. Every process computes the same.
    """
    if int(state.step) and (experiment.folder / SCORES).exists():
        return read_scores(experiment.folder)[OUT_OF_FOLD]
    config, split = experiment.config, experiment.train_split
    features, read = read_features(split.features)
    experiment.skipped.rows.update(np.flatnonzero(~read).tolist())
    status(f"fitting {len(split.classes):,} labels on {len(features):,} images by logistic regression")
    options = {"difficult": config.data.difficult_train, "seed": config.seed}
    found = fit_logistic(features, split.labels[read], **options)
    tried = f"{min(found.losses):.1g} to {max(found.losses):.1g}"
    status(f"C={found.penalty:.3g} has the least log loss of {tried}: {found.losses[found.penalty]:.4f} out of fold")

    values = {KERNEL: jnp.asarray(found.kernel), BIAS: jnp.asarray(found.bias)}
    placed = experiment.steps.place(values)
    state = state.replace(step=state.step + 1, trainable=placed, ema=copied({**placed, **state.stats}))
    selection.keep(1, "raw", "", copied(state.raw()))
    save_progress(experiment, manager, 1, state, selection)
    scores = np.full(split.labels.shape, np.nan)
    scores[read] = probabilities(found.logits_outside)
    return SplitScores(OUT_OF_FOLD, np.asarray(split.ids, str), scores, split.labels)


def read_features(table: FeatureTable) -> tuple[Float32[np.ndarray, "n d"], Bool[np.ndarray, " rows"]]:
    """Return the features of the images that could be read, and whether each of all images could be."""
    (kind,) = table.kinds
    rows = [table[row] for row in range(table.rows)]
    return np.stack([row[kind] for row in rows if row]).astype(np.float32), np.array([row is not None for row in rows])
