"""Build the optimizer and the compiled steps of a training, for one model on one mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.sources.open import count_labels
from mlmoe_jax.models.apply import PlacedModel, make_eval_step
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.runs.assemble import Parts, abstract_parts, evaluated_definition, label_axes_for, preprocess_for
from mlmoe_jax.runtime import sharding
from mlmoe_jax.training.objective import Objective, training_labels
from mlmoe_jax.training.optim import make_optimizer, make_schedules
from mlmoe_jax.training.step import TrainState, TrainStep, initial_state, make_train_step

# More steps than any warm-up has; shapes and costs of the compiled steps do not depend on the number.
ANY_LENGTH = 10**9


@dataclass(frozen=True)
class Steps(PlacedModel):
    """The optimizer and the compiled steps for one model on one mesh."""

    num_labels: int
    optimizer: optax.GradientTransformation
    averages: bool  # whether the training state has moving averages of the parameters
    objective: Objective
    learning_rate: Callable[[int], jax.Array]  # maps the number of steps taken to the learning rate, f32[]
    train_step: TrainStep
    eval_step: Callable[..., dict[str, Any]]  # the evaluation step, a result of `make_eval_step`

    def initial_state(self, parts: Parts) -> TrainState:
        """Return the initial training state of a model. It is not placed on the mesh yet."""
        trainable = {**parts.trainable, **self.objective.learned()}
        stats = {**parts.stats, **self.objective.noted()}
        opt = jax.jit(self.optimizer.init)(trainable)
        return initial_state(trainable, parts.frozen, stats, opt, averages=self.averages)

    def start(self, parts: Parts, *, resumes: bool) -> TrainState:
        """Return the initial training state of a model, placed on the mesh.

        If it `resumes`, all values except the frozen weights are ShapeDtypeStructs with shardings, into which the
        checkpoint must be restored.
        """
        state = jax.eval_shape(self.initial_state, parts) if resumes else self.initial_state(parts)
        if not resumes:
            return self.place(state)
        awaited = sharding.abstract_shards(state.replace(frozen={}), self.mesh, self.label_axes)
        return awaited.replace(frozen=self.place(parts.frozen))

    def place(self, tree: Any) -> Any:
        """Place a tree of arrays on the mesh, with the shardings of the compiled steps."""
        return sharding.shard_tree(tree, self.mesh, self.label_axes)

    def stored_form(self, placed: Any) -> Any:
        """Return a tree of placed arrays without the padding of sharded axes, as stored in checkpoints."""
        return sharding.unpad(placed, self.mesh, self.label_axes)


def build_steps(
    config: ConfigDict,
    parts: Parts,
    preprocess: Preprocess,
    mesh: Mesh,
    labels: TrainingLabels,
    *,
    total_steps: int,
    evaluated: ModelDef | None = None,
) -> Steps:
    """Build the optimizer and the steps of a config for a model. Nothing is compiled yet.

    Args:
      parts: the model. Its values may be ShapeDtypeStructs.
      labels: the training labels, on which the loss may depend.
      total_steps: the number of steps of the whole training.
      evaluated: the structure of the model for evaluation, from `evaluated_definition`. None = as in training.
    """
    num_labels = labels.codes.shape[1]
    axes = label_axes_for(parts.definition, num_labels, mesh)
    placed = PlacedModel(definition=parts.definition, preprocess=preprocess, mesh=mesh, label_axes=axes)
    objective = Objective(config.loss, labels)
    optimizer = make_optimizer(config.optim, total_steps, [*parts.trainable, *objective.learned_paths()])
    learning_rate, _ = make_schedules(config.optim, total_steps)
    return Steps(
        **vars(placed),
        num_labels=num_labels,
        optimizer=optimizer,
        averages=bool(config.ema.decay),
        objective=objective,
        learning_rate=jax.jit(learning_rate),
        train_step=make_train_step(config, placed, objective, optimizer),
        eval_step=make_eval_step(replace(placed, definition=evaluated or parts.definition)),
    )


def abstract_steps(config: ConfigDict, mesh: Mesh, num_labels: int = 0) -> tuple[Parts, Steps]:
    """Return the model, whose values are ShapeDtypeStructs, and the steps of a config, without reading data or weights.

    `num_labels` = 0 takes the number of the data set. Raises UserError if that is unknown without reading the data.
    """
    space = synthetic_label_space(num_labels or count_labels(config.data), config.model.prompts.num_groups)
    parts = abstract_parts(config, space)
    labels = training_labels(config, np.zeros((1, len(space.names)), np.int8))
    evaluated, preprocess = evaluated_definition(config, parts, space), preprocess_for(config)
    steps = build_steps(config, parts, preprocess, mesh, labels, total_steps=ANY_LENGTH, evaluated=evaluated)
    return parts, steps
