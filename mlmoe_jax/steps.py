"""What runs on the device: preparing a batch, one training step, one evaluation step. Nothing else is jitted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mlmoe_jax import losses, sharding
from mlmoe_jax.data.augment import augment
from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import Prediction
from mlmoe_jax.optim import ema_update
from mlmoe_jax.sharding import LabelAxes, unpadded
from mlmoe_jax.state import ModelDef, Params, TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Objective = Callable[[Prediction, Batch], tuple[jax.Array, Metrics]]


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

    def objective(prediction: Prediction, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = {"logits": prediction.logits, **prediction.terms}
        parts = {
            name: losses.reduce(
                per_element(logits[name], batch["label"]),
                batch["label_mask"],
                batch["mask"],
                how=settings.reduce,
                scale=settings.scale,
            )
            for name in weights
        }
        parts |= {
            name: losses.reduce(value[:, None], jnp.ones_like(value)[:, None], batch["mask"], how="mean")
            for name, value in prediction.penalties.items()
        }
        total = sum(weights.get(name, 1.0) * part for name, part in parts.items())
        return total, {f"loss/{name}": part for name, part in parts.items()}

    return objective


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
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return the training step. All randomness of step t comes from (seed, t), so a resumed run repeats it.

    labels: how the state that it will get was placed.
    """

    def step(moving: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        augment_key, model_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), moving.step))
        image = prepare(batch, preprocess, augmentation, augment_key)

        def loss_of(trainable: Params):
            model = definition.merge(*unpadded((trainable, frozen, moving.stats), labels))
            model.train()  # merged modules are made for evaluation
            with partition.over(mesh):
                prediction = model(image, labels=batch["label"], rngs=nnx.Rngs(model_key))
            loss, parts = objective(prediction, batch)
            return loss, (parts, definition.stats_of(model))

        (loss, (parts, stats)), gradient = jax.value_and_grad(loss_of, has_aux=True)(moving.trainable)
        updates, opt = optimizer.update(gradient, moving.opt, moving.trainable)
        trainable = optax.apply_updates(moving.trainable, updates)
        after = moving.replace(
            step=moving.step + 1,
            trainable=trainable,
            stats=stats,
            opt=opt,
            ema=ema_update(moving.ema, {**trainable, **stats}, ema_decay),
        )
        return after, {"loss": loss, **parts, "gradient_norm": optax.tree.norm(gradient)}

    everywhere = NamedSharding(mesh, sharding.REPLICATED)
    compiled: dict[str, Callable] = {}

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # The frozen weights are an argument of their own: they are neither donated nor returned.
        moving = state.replace(frozen={})
        if "step" not in compiled:
            out = (sharding.placements(moving, mesh, labels), everywhere)
            compiled["step"] = jax.jit(step, donate_argnums=0, out_shardings=out)
        moving, metrics = compiled["step"](moving, state.frozen, batch)
        return moving.replace(frozen=state.frozen), metrics

    return train_step


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
