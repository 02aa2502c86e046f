"""What runs on the device: preparing a batch, one training step, one evaluation step. Nothing else is jitted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mlmoe_jax.data.prepare import Batch, Preprocess, prepare
from mlmoe_jax.models import partition
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.runtime import sharding
from mlmoe_jax.runtime.sharding import LabelAxes, unpadded
from mlmoe_jax.training.objective import Metrics, Objective
from mlmoe_jax.training.optim import ema_update
from mlmoe_jax.training.state import TrainState


class TrainStep:
    """The compiled training step: (state, batch) -> (state after it, metrics).

    What moves in the state is donated. The frozen weights are neither donated nor returned.
    """

    def __init__(self, step: Callable, mesh: Mesh, labels: LabelAxes | None):
        self._step, self._mesh, self._labels = step, mesh, labels
        self._compiled: jax.stages.Compiled | None = None

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Lower the step for arguments like these, which may be ShapeDtypeStructs with shardings."""
        moving = state.replace(frozen={})
        everywhere = NamedSharding(self._mesh, sharding.REPLICATED)
        out = (sharding.placements(moving, self._mesh, self._labels), everywhere)
        return jax.jit(self._step, donate_argnums=0, out_shardings=out).lower(moving, state.frozen, batch)

    def compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Return the program, compiled now unless it was: for all arguments of the shapes of the first."""
        if self._compiled is None:
            self._compiled = self.lower(state, batch).compile()
        return self._compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one step."""
        moving, metrics = self.compile(state, batch)(state.replace(frozen={}), state.frozen, batch)
        return moving.replace(frozen=state.frozen), metrics


def make_train_step(
    definition: ModelDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    preprocess: Preprocess,
    augmentation,
    *,
    ema_decay: float,
    seed: int,
    mesh: Mesh,
    labels: LabelAxes | None = None,
    accumulate: int = 1,
) -> TrainStep:
    """Return the training step. All randomness of step t comes from (seed, t), so a resumed run repeats it.

    labels: how the state that it will get was placed. accumulate: parts in which a batch is worked off, one after the
    other, so that only one part's activations are in memory; their gradients are those of the whole batch, but batch
    norm sees a part at a time, and dropout and augmentation draw anew for each.
    """

    def differentiate(moving: TrainState, frozen: Params, batch: Batch, whole: Batch, key: jax.Array):
        augment_key, model_key = jax.random.split(key)
        image = prepare(batch, preprocess, augmentation, augment_key)

        def loss_of(trainable: Params):
            model = definition.merge(*unpadded((trainable, frozen, moving.stats), labels))
            model.train()  # merged modules are made for evaluation
            with partition.over(mesh):
                prediction = model(image, labels=batch["label"], rngs=nnx.Rngs(model_key))
            loss, parts = objective(prediction, batch, whole)
            return loss, ({"loss": loss, **parts}, definition.stats_of(model))

        gradient, (metrics, stats) = jax.grad(loss_of, has_aux=True)(moving.trainable)
        return gradient, metrics, stats

    def differentiate_parts(moving: TrainState, frozen: Params, batch: Batch, key: jax.Array):
        def add(carry, part: tuple[Batch, jax.Array]):
            total, stats = carry
            images, index = part
            now = moving.replace(stats=stats)
            gradient, metrics, stats = differentiate(now, frozen, images, batch, jax.random.fold_in(key, index))
            return (jax.tree.map(jnp.add, total, gradient), stats), metrics

        start = jax.tree.map(jnp.zeros_like, moving.trainable), moving.stats
        parts = sharding.interleaved(batch, accumulate, mesh), jnp.arange(accumulate)
        (gradient, stats), metrics = jax.lax.scan(add, start, parts)
        return gradient, jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics), stats

    def step(moving: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), moving.step)
        if accumulate == 1:
            gradient, metrics, stats = differentiate(moving, frozen, batch, batch, key)
        else:
            gradient, metrics, stats = differentiate_parts(moving, frozen, batch, key)
        updates, opt = optimizer.update(gradient, moving.opt, moving.trainable)
        trainable = optax.apply_updates(moving.trainable, updates)
        after = moving.replace(
            step=moving.step + 1,
            trainable=trainable,
            stats=stats,
            opt=opt,
            ema=ema_update(moving.ema, {**trainable, **stats}, ema_decay),
        )
        return after, {**metrics, "gradient_norm": optax.tree.norm(gradient)}

    return TrainStep(step, mesh, labels)
