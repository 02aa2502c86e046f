"""What runs on the device: preparing a batch, one training step, one evaluation step. Nothing else is jitted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from mlmoe_jax.data.augment import augment
from mlmoe_jax.data.batch import targets
from mlmoe_jax.models import losses, partition
from mlmoe_jax.models.contracts import Prediction
from mlmoe_jax.models.params import ModelDef, Params, TrainState
from mlmoe_jax.runtime import sharding
from mlmoe_jax.runtime.sharding import LabelAxes, unpadded
from mlmoe_jax.training.optim import ema_update

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Objective = Callable[..., tuple[jax.Array, Metrics]]  # of a Prediction and its Batch, see make_objective


@dataclass(frozen=True)
class Preprocess:
    """How a backbone wants its pictures: the side in pixels, and mean and deviation of each channel, for 0…1."""

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def prepare(batch: Batch, preprocess: Preprocess, augmentation=None, key: jax.Array | None = None) -> jax.Array:
    """Return the network's input f32[B,H,W,3] from `batch["image"]` u8[B,H,W,3]; with a key, augmented first.

    Training, evaluation and prediction all go through here, so that what a model is shown cannot drift apart.
    """
    image = batch["image"].astype(jnp.float32)
    if key is not None:
        image = augment(image, key, augmentation)
    return (image / 255 - jnp.asarray(preprocess.mean)) / jnp.asarray(preprocess.std)


def make_objective(settings, positive_weight: jax.Array | None = None) -> Objective:
    """Build the training loss from `config.loss`: a weighted sum over the named terms, plus the model's penalties.

    It takes a prediction, its batch, and the whole batch where that is only a part of one: the losses of the parts add
    up to the loss of the whole.
    positive_weight: f32[K] for `bce`, used where `loss.positive_weight` is 0.
    """
    if settings.kind == "asymmetric":

        def per_element(logits, labels):
            return losses.asymmetric_loss(
                logits,
                labels,
                gamma_neg=settings.gamma_neg,
                gamma_pos=settings.gamma_pos,
                clip=settings.clip,
                eps=settings.eps,
                detach=settings.detach,
            )
    elif settings.kind == "bce":
        weight = settings.positive_weight or positive_weight

        def per_element(logits, labels):
            return losses.binary_cross_entropy(logits, labels, positive_weight=weight)
    elif settings.kind == "softmax":
        per_element = losses.softmax_cross_entropy
    else:

        def per_element(logits, labels):
            return losses.focal_loss(logits, labels, gamma=settings.gamma_neg, detach=settings.detach)

    weights = {name: weight for name, weight in settings.terms.items() if weight}

    def objective(prediction: Prediction, batch: Batch, whole: Batch | None = None) -> tuple[jax.Array, Metrics]:
        whole = batch if whole is None else whole
        logits = {"logits": prediction.logits, **prediction.terms}
        entries, images = losses.count_valid(whole["label_mask"], whole["mask"]), jnp.sum(whole["mask"] != 0)
        parts = {
            name: losses.reduce(
                per_element(logits[name], batch["label"]),
                batch["label_mask"],
                batch["mask"],
                how=settings.reduce,
                scale=settings.scale,
                count=entries,
            )
            for name in weights
        }
        parts |= {
            name: losses.reduce(value[:, None], jnp.ones_like(value)[:, None], batch["mask"], count=images)
            for name, value in prediction.penalties.items()
        }
        total = sum(weights.get(name, 1.0) * part for name, part in parts.items())
        return total, {f"loss/{name}": part for name, part in parts.items()}

    return objective


def training_objective(config: ConfigDict, labels: np.ndarray) -> Objective:
    """Return the loss of a config; `labels` i8[N,K] of the training split balance it where it asks for that."""
    balanced = config.loss.kind == "bce" and not config.loss.positive_weight
    return make_objective(config.loss, _negatives_over_positives(labels, config.data.difficult) if balanced else None)


def _negatives_over_positives(labels: np.ndarray, difficult: str) -> jax.Array:
    """The weight that balances each label's positives with its known negatives, f32[K]; 1 where it has no positive."""
    positives, known = (np.zeros(labels.shape[1]) for _ in range(2))
    for rows in np.array_split(labels, max(1, len(labels) // 10_000)):
        label, mask = targets(rows, difficult)
        positives += (label * mask).sum(axis=0)
        known += mask.sum(axis=0)
    weight = np.where(positives > 0, (known - positives) / np.maximum(positives, 1), 1.0)
    return jnp.asarray(np.maximum(weight, 1e-3), jnp.float32)


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


def predicted(definition: ModelDef, preprocess: Preprocess, values: Params, batch: Batch) -> Prediction:
    """Return what a model with all its values says of a batch."""
    return definition.merge(values)(prepare(batch, preprocess))


def make_eval_step(
    definition: ModelDef, preprocess: Preprocess, mesh: Mesh, labels: LabelAxes | None = None, *, gates: bool = False
) -> Callable[[Params, Params, Batch], dict[str, Any]]:
    """Return the step of evaluation and prediction: (values, frozen, batch) -> logits f32[B,K], `id` and `mask`.

    values: trainable and stats together. labels: how they and the frozen were placed. gates: return `gates` too, name
    -> f32[B or 1,K,E]. Every process receives the whole global batch's results.
    """

    def step(values: Params, frozen: Params, batch: Batch) -> dict[str, Any]:
        with partition.over(mesh):
            prediction = predicted(definition, preprocess, unpadded({**values, **frozen}, labels), batch)
        found = {"logits": prediction.logits, "id": batch["id"], "mask": batch["mask"]}
        return {**found, "gates": prediction.gates} if gates else found

    return jax.jit(step, out_shardings=NamedSharding(mesh, sharding.REPLICATED))
