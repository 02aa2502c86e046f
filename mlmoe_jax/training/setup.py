"""Everything that a training needs before its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax import config as configuration
from mlmoe_jax.data.check import require_sound
from mlmoe_jax.data.labels.space import LabelSpace, label_space_of
from mlmoe_jax.data.pipeline import SkippedImages, steps_per_epoch
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.sources import open_split, original_name
from mlmoe_jax.data.split import UNKNOWN, Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.evaluate import measure, score_split
from mlmoe_jax.evaluation.results import Scored
from mlmoe_jax.inference.step import make_eval_step
from mlmoe_jax.models.params import Params, parameter_table
from mlmoe_jax.runs.assemble import label_axes, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import has_checkpoint, read_run
from mlmoe_jax.runtime.progress import say
from mlmoe_jax.runtime.sharding import LabelAxes, setup_jax, without_padding
from mlmoe_jax.training.initialization import starting_parts
from mlmoe_jax.training.objective import training_objective
from mlmoe_jax.training.optim import make_optimizer, make_schedules
from mlmoe_jax.training.state import TrainState, initial_state
from mlmoe_jax.training.step import TrainStep, make_train_step


@dataclass(frozen=True)
class Job:
    """Everything about a training that does not change while it runs."""

    config: ConfigDict
    folder: RunFolder
    mesh: Mesh
    labels: LabelAxes | None  # how the state lies over the mesh
    train_split: Split
    held_out: dict[str, Split]  # the splits that are evaluated, by name
    watched: str  # the one of them that is evaluated while training; "" = none
    skipped: SkippedImages  # of the training split
    label_space: LabelSpace
    preprocess: Preprocess
    unpublished: frozenset[str]  # the frozen values that only the run folder will hold
    steps_per_epoch: int
    total_steps: int
    learning_rate: Callable
    train_step: TrainStep
    eval_step: Callable

    def score(self, values: Params, frozen: Params, split: Split) -> Scored:
        """Score a split with some values."""
        settings = self.config.eval
        return score_split(self.eval_step, values, frozen, split, self.config.data, settings.batch_size, self.mesh)

    def measure(self, scored: Scored) -> dict[str, float]:
        """Return the metrics of a scored split."""
        return measure(scored, self.label_space, self.config)


def set_up(config: ConfigDict, folder: RunFolder) -> tuple[Job, TrainState]:
    """Open the data, build the model, its initial state and the steps.

    Nothing is written yet, and the state is not on the mesh yet: whoever trains puts it there.
    """
    mesh = setup_jax(config)

    # -------------------------------------------------------------------------------------------------- data
    preprocess = preprocess_for(config)
    train_split = open_split(config.data, config.data.train_split, seed=config.seed)
    label_space = _label_space(config, folder, train_split)
    watched = config.data.test_splits[0] if config.eval.select_on == "test" else config.data.val_split
    held_out = {
        name: open_split(config.data, name, classes=train_split.classes, seed=config.seed)
        for name in dict.fromkeys(filter(None, (watched, *config.data.test_splits)))
    }
    if config.model.head.kind == "cnn_rnn" and (train_split.labels == UNKNOWN).any():
        say("warning: cnn_rnn learns label sequences, in which an unknown label counts as absent")
    for warning in [*configuration.warnings(config), *require_sound(train_split, list(held_out.values()))]:
        say(f"warning: {warning}")
    per_epoch = steps_per_epoch(len(train_split), config.train.batch_size)
    total_steps = config.train.epochs * per_epoch
    say(f"{config.data.name}: {len(train_split):,} training images, {len(label_space.names)} labels")

    # ------------------------------------------------------------------------------------------------- model
    labels = label_axes(config, len(label_space.names), mesh)
    parts = starting_parts(config, label_space, folder)
    say(parameter_table(parts.trainable, parts.frozen))

    # ------------------------------------------------------------------------------------------------- steps
    optimizer = make_optimizer(config.optim, total_steps, parts.trainable)
    learning_rate, _ = make_schedules(config.optim, total_steps)
    objective = training_objective(config, train_split.labels)
    train_step = make_train_step(
        parts.definition,
        objective,
        optimizer,
        preprocess,
        config.augment,
        ema_decay=config.ema.decay,
        seed=config.seed,
        mesh=mesh,
        labels=labels,
        accumulate=config.train.accumulate,
    )
    job = Job(
        config=config,
        folder=folder,
        mesh=mesh,
        labels=labels,
        train_split=train_split,
        held_out=held_out,
        watched=watched,
        skipped=SkippedImages(train_split),
        label_space=label_space,
        preprocess=preprocess,
        unpublished=parts.unpublished,
        steps_per_epoch=per_epoch,
        total_steps=total_steps,
        learning_rate=jax.jit(learning_rate),
        train_step=train_step,
        eval_step=make_eval_step(parts.definition, preprocess, mesh, labels),
    )
    state = initial_state(parts.trainable, parts.frozen, parts.stats, optimizer.init(parts.trainable))
    return job, state


def _stored_form(job: Job, placed: Any) -> Any:
    """Return placed values as checkpoints hold them, whatever the mesh."""
    return without_padding(placed, job.mesh, job.labels)


def _copy(values: Params) -> Params:
    """Copy values that the next step's donation would take away."""
    return jax.tree.map(jnp.copy, values)


def _label_space(config: ConfigDict, folder: RunFolder, train_split: Split) -> LabelSpace:
    """Return the label space of the training split, or that of a run that goes on.

    Groups may be cut otherwise by another version of a library, and a file of word vectors may have changed since: what
    a model was trained with stays with it.
    """
    if not has_checkpoint(folder):
        return label_space_of(train_split, original_name(config.data), config.model, config.seed)
    _, label_space = read_run(folder)
    if label_space.names != tuple(train_split.classes):
        raise UserError(f"{folder} holds a run on other labels than the data has now; train in another --workdir")
    return label_space
