"""The state of a training, and the compiled step that changes it: gradients, optimizer, moving averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from mlmoe_jax.data.prepare import Batch, Preprocess
from mlmoe_jax.models.adapters.prompts import clip_to_bounds
from mlmoe_jax.models.apply import apply_model
from mlmoe_jax.models.losses import LOSS_VALUES
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.runtime.sharding import REPLICATED, LabelAxes, copy_tree, interleave, tree_shardings
from mlmoe_jax.training.mixing import Mixing
from mlmoe_jax.training.objective import Objective, StepMetrics
from mlmoe_jax.training.optim import ema_update, updates_made


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run after `step` steps.

    Attributes:
      trainable: parameters that the optimizer updates, and learned values of the loss.
      frozen: parameters that nothing updates.
      stats: values that the forward pass updates, and noted values of the loss.
      opt: the state of the optimizer.
      ema: moving averages of `raw`; {} for a decay of 0.
    """

    step: jax.Array
    trainable: Params
    frozen: Params
    stats: Params
    opt: Any
    ema: Params

    def replace(self, **changes) -> TrainState:
        return replace(self, **changes)

    def raw(self) -> Params:
        """Return the values of the model in trainable and stats, the counterpart of `ema`."""
        return split_loss_values({**self.trainable, **self.stats})[0]

    def updated(
        self, gradient: Params, stats: Params, optimizer: optax.GradientTransformation, ema_decay: float
    ) -> TrainState:
        """Return the state after an update of the optimizer; `stats` are those after the forward pass."""
        updates, opt = optimizer.update(gradient, self.opt, self.trainable)
        trainable = optax.apply_updates(self.trainable, updates)
        after = self.replace(step=self.step + 1, trainable=trainable, stats=stats, opt=opt)
        if self.ema:
            after = after.replace(ema=ema_update(self.ema, after.raw(), ema_decay))
        return after

    def latest(self) -> Params:
        """Return the moving averages if the state has any, otherwise `raw()`."""
        return self.ema or self.raw()


def split_loss_values(values: Params) -> tuple[Params, Params]:
    """Split values by their owner: return the values of the model and the values of the loss."""
    loss = {path: value for path, value in values.items() if path.startswith(LOSS_VALUES)}
    model = {path: value for path, value in values.items() if path not in loss}
    return model, loss


def initial_state(trainable: Params, frozen: Params, stats: Params, opt: Any, *, averages: bool = True) -> TrainState:
    """Return the state before the first step; the moving averages, if any, start at the initial values.

    Every value that a step donates is copied, because a buffer that occurs twice cannot be donated.
    """
    averaged = split_loss_values({**trainable, **stats})[0] if averages else {}
    trainable, stats, opt, ema = copy_tree((trainable, stats, opt, averaged))
    return TrainState(jnp.asarray(np.int32(0)), trainable, frozen, stats, opt, ema)


# (state without frozen, frozen, part of a batch, whole batch, key) -> gradient, metrics, statistics after the part
Differentiate = Callable[[TrainState, Params, Batch, Batch, jax.Array], tuple[Params, StepMetrics, Params]]


class TrainStep:
    """The compiled training step: (state, batch) -> (new state, metrics).

    The state is donated, except for its frozen weights, which the program does not return.
    """

    def __init__(self, step: Callable, mesh: Mesh, label_axes: LabelAxes | None):
        self._step, self._mesh, self._label_axes = step, mesh, label_axes
        self._compiled: jax.stages.Compiled | None = None

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Lower the step for arguments, or for their ShapeDtypeStructs with shardings."""
        moving = state.replace(frozen={})
        out = tree_shardings(moving, self._mesh, self._label_axes), NamedSharding(self._mesh, REPLICATED)
        return jax.jit(self._step, donate_argnums=0, out_shardings=out).lower(moving, state.frozen, batch)

    def compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Return the program, compiled on the first call. Later arguments must have the same shapes."""
        if self._compiled is None:
            self._compiled = self.lower(state, batch).compile()
        return self._compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take one step. Under JAX_DISABLE_JIT=1 it runs operation by operation, so that a debugger sees the values."""
        step = self._step if jax.config.jax_disable_jit else self.compile(state, batch)
        moving, metrics = step(state.replace(frozen={}), state.frozen, batch)
        return moving.replace(frozen=state.frozen), metrics


def make_train_step(
    definition: ModelDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    preprocess: Preprocess,
    *,
    ema_decay: float,
    seed: int,
    mesh: Mesh,
    label_axes: LabelAxes | None = None,
    accumulate: int = 1,
    mixing: Mixing | None = None,
    skips: bool = False,
) -> TrainStep:
    """Return the training step. All randomness of step t comes from (seed, t), so a resumed run repeats it.

    Args:
      definition: the structure of the model.
      objective: the loss.
      optimizer: the optimizer.
      ema_decay: the decay of the moving averages.
      label_axes: as in `sharding.shard_tree` of the state.
      accumulate: number of parts into which a batch is split. Only the activations of one part are in memory at a time
        (see `_accumulated`).
      mixing: a change of the whole batch, see `training.mixing`.
      skips: a step whose loss or gradient is not finite changes only the number of the step. The metrics then have
        `skipped_steps`, the number of such steps so far.
    """

    differentiate = _make_differentiate(definition, objective, preprocess, mesh, label_axes)
    if accumulate > 1:
        differentiate = _accumulated(differentiate, accumulate, mesh)

    def step(moving: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.key(seed), moving.step)
        moving = moving.replace(trainable=clip_to_bounds(moving.trainable))
        if mixing is not None:
            batch = mixing(batch, jax.random.split(key)[0])  # the model uses the second half
        gradient, metrics, stats = differentiate(moving, frozen, batch, batch, key)

        after = moving.updated(gradient, stats, optimizer, ema_decay)
        metrics = {**metrics, "gradient_norm": optax.tree.norm(gradient)}
        if skips:
            after = _unless_finite(metrics, moving, after)
            metrics["skipped_steps"] = after.step - updates_made(after.opt)
        return after, metrics

    return TrainStep(step, mesh, label_axes)


def _unless_finite(metrics: StepMetrics, before: TrainState, after: TrainState) -> TrainState:
    """Return the state after a step; only its number changes if the loss or the gradient is not finite."""
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
    return jax.tree.map(partial(jnp.where, finite), after, before.replace(step=after.step))


def _make_differentiate(
    definition: ModelDef, objective: Objective, preprocess: Preprocess, mesh: Mesh, label_axes: LabelAxes | None
) -> Differentiate:
    """Return the gradient of the training loss by the trainable values."""

    def differentiate(moving: TrainState, frozen: Params, batch: Batch, whole: Batch, key: jax.Array):
        def loss_of(trainable: Params):
            values, loss_values = split_loss_values({**trainable, **frozen, **moving.stats})
            prediction, stats = apply_model(definition, values, batch, preprocess, mesh, label_axes, key=key)
            loss, parts = objective(prediction, batch, whole, step=moving.step, values=loss_values)
            noted = objective.note(prediction, batch, moving.step, loss_values)
            return loss, ({"loss": loss, **parts}, {**stats, **noted})

        gradient, (metrics, stats) = jax.grad(loss_of, has_aux=True)(moving.trainable)
        return gradient, metrics, stats

    return differentiate


def _accumulated(differentiate: Differentiate, parts: int, mesh: Mesh) -> Differentiate:
    """Return `differentiate` for a batch that is split into `parts`, computed one after another.

    The result is the gradient of the whole batch, but batch norm sees one part at a time, and dropout uses
    other random numbers for each part.
    """

    def accumulated(moving: TrainState, frozen: Params, batch: Batch, whole: Batch, key: jax.Array):
        def add(carry, part: tuple[Batch, jax.Array]):
            total, stats = carry
            images, index = part
            now = moving.replace(stats=stats)
            gradient, metrics, stats = differentiate(now, frozen, images, whole, jax.random.fold_in(key, index))
            return (jax.tree.map(jnp.add, total, gradient), stats), metrics

        start = jax.tree.map(jnp.zeros_like, moving.trainable), moving.stats
        (gradient, stats), metrics = jax.lax.scan(add, start, (interleave(batch, parts, mesh), jnp.arange(parts)))
        return gradient, jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics), stats

    return accumulated
