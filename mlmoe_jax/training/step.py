"""The compiled training step: gradients, optimizer, moving averages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from mlmoe_jax.data.prepare import Batch, Preprocess
from mlmoe_jax.models.apply import apply
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.models.prompts import within_bounds
from mlmoe_jax.runtime.sharding import REPLICATED, LabelAxes, interleaved, placements
from mlmoe_jax.training.objective import Metrics, Objective
from mlmoe_jax.training.optim import ema_update, updates_made
from mlmoe_jax.training.state import TrainState

# (state without frozen, frozen, part of a batch, whole batch, key) -> gradient, metrics, statistics after the part
Differentiate = Callable[[TrainState, Params, Batch, Batch, jax.Array], tuple[Params, Metrics, Params]]


_KINDS = ("frozen", "trainable", "statistics", "optimizer", "output", "loss", "gradient")


class TrainStep:
    """The compiled training step: (state, batch) -> (state after it, metrics).

    The state is donated, except for its frozen weights, which the program does not return either.
    """

    def __init__(self, step: Callable, values: Callable, mesh: Mesh, label_axes: LabelAxes | None):
        self._values = values
        self._step, self._mesh, self._label_axes = step, mesh, label_axes
        self._compiled: jax.stages.Compiled | None = None

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Lower the step for these arguments, which may be ShapeDtypeStructs with shardings."""
        moving = state.replace(frozen={})
        out = placements(moving, self._mesh, self._label_axes), NamedSharding(self._mesh, REPLICATED)
        return jax.jit(self._step, donate_argnums=0, out_shardings=out).lower(moving, state.frozen, batch)

    def compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Return the program, compiled on the first call; later arguments must have the same shapes."""
        if self._compiled is None:
            self._compiled = self.lower(state, batch).compile()
        return self._compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one step."""
        moving, metrics = self.compile(state, batch)(state.replace(frozen={}), state.frozen, batch)
        return moving.replace(frozen=state.frozen), metrics

    def tensors(self, state: TrainState, batch: Batch) -> list[tuple[str, Any]]:
        """Return which values of a step are finite: kinds of values and their trees of bool[], in order of computation.

        The step is computed a second time, so the state must be the one before it.
        """
        return list(zip(_KINDS, jax.jit(self._values)(state.replace(frozen={}), state.frozen, batch), strict=True))


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
    skips: bool = False,
) -> TrainStep:
    """Return the training step. All randomness of step t comes from (seed, t), so a resumed run repeats it.

    label_axes: those with which the state is placed. accumulate: number of parts into which a batch is split; they are
    computed one after another, so only the activations of one part are in memory (see `_accumulated`). skips: a step
    whose loss or gradient is not finite changes nothing but the number of the step; the metrics then have
    `skipped_steps`, the number so far.
    """

    def differentiate(moving: TrainState, frozen: Params, batch: Batch, whole: Batch, key: jax.Array):
        def loss_of(trainable: Params):
            values = {**trainable, **frozen, **moving.stats}
            prediction, stats = apply(definition, values, batch, preprocess, mesh, label_axes, key=key)
            loss, parts = objective(prediction, batch, whole)
            return loss, ({"loss": loss, **parts}, stats)

        gradient, (metrics, stats) = jax.grad(loss_of, has_aux=True)(moving.trainable)
        return gradient, metrics, stats

    gradient_of = differentiate if accumulate == 1 else _accumulated(differentiate, accumulate, mesh)

    def step(moving: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), moving.step)
        moving = moving.replace(trainable=within_bounds(moving.trainable))
        gradient, metrics, stats = gradient_of(moving, frozen, batch, batch, key)
        updates, opt = optimizer.update(gradient, moving.opt, moving.trainable)
        trainable = optax.apply_updates(moving.trainable, updates)
        ema = ema_update(moving.ema, {**trainable, **stats}, ema_decay)
        after = moving.replace(step=moving.step + 1, trainable=trainable, stats=stats, opt=opt, ema=ema)
        metrics = {**metrics, "gradient_norm": optax.tree.norm(gradient)}
        if skips:
            taken = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
            after = jax.tree.map(partial(jnp.where, taken), after, moving.replace(step=after.step))
            metrics["skipped_steps"] = after.step - updates_made(after.opt)
        return after, metrics

    def forward(values: Params, batch: Batch, key: jax.Array) -> Any:
        return apply(definition, values, batch, preprocess, mesh, label_axes, key=key)[0]

    return TrainStep(step, _finite_values(forward, gradient_of, seed), mesh, label_axes)


def _finite_values(forward: Callable, gradient_of: Differentiate, seed: int) -> Callable:
    """Return the function behind `TrainStep.tensors`."""

    def values(moving: TrainState, frozen: Params, batch: Batch) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), moving.step)
        prediction = forward({**moving.trainable, **frozen, **moving.stats}, batch, key)
        gradient, metrics, _ = gradient_of(moving, frozen, batch, batch, key)
        found = (frozen, moving.trainable, moving.stats, moving.opt, prediction, metrics, gradient)
        return jax.tree.map(lambda value: jnp.all(jnp.isfinite(value)), found)

    return values


def _accumulated(differentiate: Differentiate, parts: int, mesh: Mesh) -> Differentiate:
    """Return `differentiate` for a batch that is split into `parts`, computed one after another.

    The gradients are those of the whole batch, but batch norm sees one part at a time, and dropout uses
    other random numbers for each part.
    """

    def of_batch(moving: TrainState, frozen: Params, batch: Batch, whole: Batch, key: jax.Array):
        def add(carry, part: tuple[Batch, jax.Array]):
            total, stats = carry
            images, index = part
            now = moving.replace(stats=stats)
            gradient, metrics, stats = differentiate(now, frozen, images, whole, jax.random.fold_in(key, index))
            return (jax.tree.map(jnp.add, total, gradient), stats), metrics

        start = jax.tree.map(jnp.zeros_like, moving.trainable), moving.stats
        (gradient, stats), metrics = jax.lax.scan(add, start, (interleaved(batch, parts, mesh), jnp.arange(parts)))
        return gradient, jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics), stats

    return of_batch
