"""The training state and the compiled training step: gradients, optimizer update, and moving averages."""

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
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from mlmoe_jax.data.prepare import Batch
from mlmoe_jax.models.adapters.prompts import clip_to_bounds
from mlmoe_jax.models.apply import PlacedModel, apply_model
from mlmoe_jax.models.losses import LOSS_VALUES
from mlmoe_jax.models.params import Params
from mlmoe_jax.runtime.compiler import compiler_options
from mlmoe_jax.runtime.sharding import REPLICATED, LabelAxes, copy_tree, interleave, tree_shardings
from mlmoe_jax.training.mixing import make_mixing
from mlmoe_jax.training.objective import Objective, StepMetrics
from mlmoe_jax.training.optim import ema_schedule, ema_update, global_norm, updates_made


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a training after `step` steps."""

    step: jax.Array  # i32[], the number of steps taken
    # Path -> value that the optimizer updates: parameters of the model, and learned values of the loss
    trainable: Params
    frozen: Params  # path -> value that never changes
    stats: Params  # path -> value that the forward pass updates: batch statistics, and noted values of the loss
    opt: Any
    ema: Params  # path -> exponential moving average of `raw()`; {} if the config has no moving averages (decay 0)

    def replace(self, **changes) -> TrainState:
        return replace(self, **changes)

    def raw(self) -> Params:
        """Return path -> value of the model: trainable parameters and batch statistics. `ema` has the same paths."""
        return split_loss_values({**self.trainable, **self.stats})[0]

    def updated(
        self, gradient: Params, stats: Params, optimizer: optax.GradientTransformation, ema_decay: ArrayLike
    ) -> TrainState:
        """Return the state after an optimizer update, with `stats` as the forward pass left them."""
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
    """Split a dict by path. Return (values of the model, values of the loss)."""
    loss = {path: value for path, value in values.items() if path.startswith(LOSS_VALUES)}
    model = {path: value for path, value in values.items() if path not in loss}
    return model, loss


def initial_state(trainable: Params, frozen: Params, stats: Params, opt: Any, *, averages: bool = True) -> TrainState:
    """Return the state before the first step. The moving averages start at the initial values.

    All values except `frozen` are copied. The training step donates them, and a buffer must not be donated twice.

    Args:
      trainable: as in `TrainState`.
      frozen: as in `TrainState`.
      stats: as in `TrainState`.
      opt: as in `TrainState`.
      averages: whether the state has moving averages.
    """
    averaged = split_loss_values({**trainable, **stats})[0] if averages else {}
    trainable, stats, opt, ema = copy_tree((trainable, stats, opt, averaged))
    return TrainState(jnp.asarray(np.int32(0)), trainable, frozen, stats, opt, ema)


# (state without frozen, frozen, part of a batch, whole batch, key) -> gradient, metrics, statistics after the part
Differentiate = Callable[[TrainState, Params, Batch, Batch, jax.Array], tuple[Params, StepMetrics, Params]]


class TrainStep:
    """The compiled training step, a function (state, batch) -> (new state, metrics).

    All buffers of the state are donated, except the frozen weights, which the compiled function does not return.
    """

    def __init__(self, step: Callable, mesh: Mesh, label_axes: LabelAxes | None):
        self._step, self._mesh, self._label_axes = step, mesh, label_axes
        self._options = compiler_options(mesh.devices.flat[0].platform)
        self._compiled: jax.stages.Compiled | None = None

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Lower the step (see `jax.jit(...).lower`). Arguments are arrays, or ShapeDtypeStructs with shardings."""
        moving = state.replace(frozen={})
        out = tree_shardings(moving, self._mesh, self._label_axes), NamedSharding(self._mesh, REPLICATED)
        step = jax.jit(self._step, donate_argnums=0, out_shardings=out, compiler_options=self._options)
        return step.lower(moving, state.frozen, batch)

    def compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Return the compiled step, which the first call compiles. All calls must have arguments of equal shapes."""
        if self._compiled is None:
            self._compiled = self.lower(state, batch).compile()
        return self._compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Run one training step; with JAX_DISABLE_JIT=1 operation by operation, so that a debugger sees values."""
        step = self._step if jax.config.jax_disable_jit else self.compile(state, batch)
        moving, metrics = step(state.replace(frozen={}), state.frozen, batch)
        return moving.replace(frozen=state.frozen), metrics


def make_train_step(
    config: ConfigDict, placed: PlacedModel, objective: Objective, optimizer: optax.GradientTransformation
) -> TrainStep:
    """Return the training step of a config.

    Random numbers depend only on `seed` and the step, so a resumed run repeats them. With `train.accumulate`, only the
    activations of one part of a batch are in memory at a time, see `_accumulated`. With `train.skip_nonfinite`, a step
    whose loss or gradient is not finite changes nothing but the step number, and the metrics include `skipped_steps`,
    the number of such steps so far.
    """
    ema_decay, mixing = ema_schedule(config.ema), make_mixing(config.augment)
    differentiate = _make_differentiate(placed, objective)
    if config.train.accumulate > 1:
        differentiate = _accumulated(differentiate, config.train.accumulate, placed.mesh)

    def step(moving: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), moving.step)
        moving = moving.replace(trainable=clip_to_bounds(moving.trainable))
        if mixing is not None:
            batch = mixing(batch, jax.random.split(key)[0])  # the model uses the second half
        gradient, metrics, stats = differentiate(moving, frozen, batch, batch, key)

        after = moving.updated(gradient, stats, optimizer, ema_decay(moving.step))
        metrics = {**metrics, "gradient_norm": global_norm(gradient)}
        if config.train.skip_nonfinite:
            after = _unless_finite(metrics, moving, after)
            metrics["skipped_steps"] = after.step - updates_made(after.opt)
        return after, metrics

    return TrainStep(step, placed.mesh, placed.label_axes)


def _unless_finite(metrics: StepMetrics, before: TrainState, after: TrainState) -> TrainState:
    """Return `after` if the loss and the gradient are finite, otherwise `before` with the step number of `after`."""
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
    return jax.tree.map(partial(jnp.where, finite), after, before.replace(step=after.step))


def _make_differentiate(placed: PlacedModel, objective: Objective) -> Differentiate:
    """Return a function that computes the gradient of the loss by the trainable values, as described at
    `Differentiate`.
    """

    def differentiate(moving: TrainState, frozen: Params, batch: Batch, whole: Batch, key: jax.Array):
        def loss_of(trainable: Params):
            values, loss_values = split_loss_values({**trainable, **frozen, **moving.stats})
            prediction, stats = apply_model(placed, values, batch, key=key)
            loss, parts = objective(prediction, batch, whole, step=moving.step, values=loss_values)
            noted = objective.note(prediction, batch, moving.step, loss_values)
            return loss, ({"loss": loss, **parts}, {**stats, **noted})

        gradient, (metrics, stats) = jax.grad(loss_of, has_aux=True)(moving.trainable)
        return gradient, metrics, stats

    return differentiate


def _accumulated(differentiate: Differentiate, parts: int, mesh: Mesh) -> Differentiate:
    """Return a function like `differentiate` that splits the batch into parts and computes them one after another.

    The result is the gradient of the whole batch, with two differences: batch norm uses the statistics of each part,
    and dropout draws other random numbers for each part.
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
