"""The data, the model and the compiled steps of a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax import config as configuration
from mlmoe_jax.data.check import check_splits
from mlmoe_jax.data.labels.space import LabelSpace, label_space_of, synthetic_label_space
from mlmoe_jax.data.pipeline import SkippedImages, steps_per_epoch
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.sources.open import count_labels, open_splits, original_name
from mlmoe_jax.data.split import UNKNOWN, Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.evaluate import measure, score_split
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.inference.step import make_eval_step
from mlmoe_jax.models.heads.catalog import head_of
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs.assemble import Parts, abstract_parts, label_axes_for, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import read_run
from mlmoe_jax.runtime import sharding
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import LabelAxes
from mlmoe_jax.training.objective import training_objective
from mlmoe_jax.training.optim import make_optimizer, make_schedules
from mlmoe_jax.training.selection import selection_split
from mlmoe_jax.training.state import TrainState, initial_state
from mlmoe_jax.training.step import TrainStep, make_train_step

# A length of training that no warm-up exceeds; neither shapes nor costs of the steps depend on it.
ANY_LENGTH = 10**9


# -------------------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class TrainingData:
    """The opened splits of a training.

    eval_splits: those that are evaluated, by name. selection_split: the one of them that is evaluated during training;
    "" = none. skipped: images of the training split that could not be read.
    """

    train_split: Split
    eval_splits: dict[str, Split]
    selection_split: str
    label_space: LabelSpace
    skipped: SkippedImages
    steps_per_epoch: int


def open_data(config: ConfigDict, folder: RunFolder, *, resumes: bool) -> TrainingData:
    """Open the splits that a training needs, and warn of what is doubtful about them.

    resumes: the label space is that of the run in the folder. Another version of a library may group labels
    differently, and a file of word vectors may have changed since: a model keeps the label space it was trained with.
    Raises UserError for data that cannot be trained on, or whose labels are not those of the run.
    """
    selecting = selection_split(config)
    names = [name for name in (selecting, *config.data.test_splits) if name]
    splits = open_splits(config.data, names, seed=config.seed)
    train_split, eval_splits = splits[config.data.train_split], {name: splits[name] for name in names}
    if resumes:
        _, label_space = read_run(folder)
        if label_space.names != tuple(train_split.classes):
            raise UserError(f"{folder} holds a run on other labels than the data has now; train in another --workdir")
    else:
        label_space = label_space_for(config, train_split)
    if head_of(config).unknown_labels and (train_split.labels == UNKNOWN).any():
        status(f"warning: {config.model.head.kind} {head_of(config).unknown_labels}")
    for warning in [*configuration.warnings(config), *check_splits(train_split, list(eval_splits.values()))]:
        status(f"warning: {warning}")
    status(f"{config.data.name}: {len(train_split):,} training images, {len(label_space.names)} labels")
    return TrainingData(
        train_split,
        eval_splits,
        selecting,
        label_space,
        SkippedImages(train_split),
        steps_per_epoch(len(train_split), config.train.batch_size),
    )


def label_space_for(config: ConfigDict, train_split: Split) -> LabelSpace:
    """Return the label space of a new run on a training split."""
    vectors = head_of(config).needs_vectors
    return label_space_of(train_split, original_name(config.data), config.model, config.seed, vectors=vectors)


# ------------------------------------------------------------------------------------------------------------- steps
@dataclass(frozen=True)
class Steps:
    """What trains and evaluates one model on one mesh.

    learning_rate: number of steps taken -> f32[], jitted. train_step: see TrainStep. eval_step: see `make_eval_step`.
    """

    num_labels: int
    mesh: Mesh
    label_axes: LabelAxes | None
    preprocess: Preprocess
    total_steps: int
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[int], jax.Array]
    train_step: TrainStep
    eval_step: Callable[..., dict[str, Any]]

    def initial_state(self, parts: Parts) -> TrainState:
        """Return the state of a model before its first step, not placed on the mesh yet."""
        return initial_state(parts.trainable, parts.frozen, parts.stats, self.optimizer.init(parts.trainable))

    def place(self, tree: Any) -> Any:
        """Put a tree of values on the mesh, as the steps expect them."""
        return sharding.place(tree, self.mesh, self.label_axes)

    def stored_form(self, placed: Any) -> Any:
        """Return placed values as checkpoints hold them, whatever the mesh."""
        return sharding.without_padding(placed, self.mesh, self.label_axes)


def build_steps(
    config: ConfigDict, parts: Parts, preprocess: Preprocess, mesh: Mesh, train_labels: np.ndarray, *, total_steps: int
) -> Steps:
    """Build the optimizer and the steps of a config for a model, which may be abstract; nothing is compiled yet.

    train_labels: codes i8[N,K] of the training split, from which a balanced loss takes its weights.
    """
    num_labels = train_labels.shape[1]
    label_axes = label_axes_for(config, num_labels, mesh)
    optimizer = make_optimizer(config.optim, total_steps, parts.trainable)
    learning_rate, _ = make_schedules(config.optim, total_steps)
    train_step = make_train_step(
        parts.definition,
        training_objective(config, train_labels),
        optimizer,
        preprocess,
        config.augment,
        ema_decay=config.ema.decay,
        seed=config.seed,
        mesh=mesh,
        label_axes=label_axes,
        accumulate=config.train.accumulate,
    )
    return Steps(
        num_labels=num_labels,
        mesh=mesh,
        label_axes=label_axes,
        preprocess=preprocess,
        total_steps=total_steps,
        optimizer=optimizer,
        learning_rate=jax.jit(learning_rate),
        train_step=train_step,
        eval_step=make_eval_step(parts.definition, preprocess, mesh, label_axes),
    )


def abstract_steps(config: ConfigDict, mesh: Mesh, num_labels: int = 0) -> tuple[Parts, Steps]:
    """Return a config's model and steps without data or weights: every value is a ShapeDtypeStruct.

    num_labels: 0 = as many as the data set has. Raises UserError if that number is not known without the data.
    """
    space = synthetic_label_space(num_labels or count_labels(config.data), config.model.prompts.num_groups)
    parts, labels = abstract_parts(config, space), np.zeros((1, len(space.names)), np.int8)
    return parts, build_steps(config, parts, preprocess_for(config), mesh, labels, total_steps=ANY_LENGTH)


# --------------------------------------------------------------------------------------------------------------- job
@dataclass(frozen=True)
class Job:
    """Everything about a training that does not change while it runs."""

    config: ConfigDict
    folder: RunFolder
    data: TrainingData
    steps: Steps

    def score(self, values: Params, frozen: Params, split: Split) -> SplitScores:
        """Score a split with some values."""
        options = {"data_config": self.config.data, "batch_size": self.config.eval.batch_size, "mesh": self.steps.mesh}
        return score_split(self.steps.eval_step, values, frozen, split, **options)

    def measure(self, scored: SplitScores) -> dict[str, float]:
        """Return the metrics of a scored split."""
        return measure(scored, self.data.label_space, self.config)
