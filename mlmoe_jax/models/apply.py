"""Apply a model to a batch, and build jitted steps for evaluation, prediction and features."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mlmoe_jax.data.prepare import Batch, Preprocess
from mlmoe_jax.models import partition
from mlmoe_jax.models.attributes import AttributeSoftmax
from mlmoe_jax.models.mosaics import CELLS, classify_mosaics
from mlmoe_jax.models.outputs import Features, Prediction
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.runtime.compiler import compiler_options
from mlmoe_jax.runtime.sharding import REPLICATED, LabelAxes, remove_padding


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """The structure of a model, and the mesh on which its values are placed.

    Attributes:
      preprocess: what happens to images before the model.
      mesh: it is None only in a program that is exported, which has no sharding.
      label_axes: the label axis of each parameter, as in `shard_tree`; None if no parameter is sharded over labels.
    """

    definition: ModelDef
    preprocess: Preprocess
    mesh: Mesh
    label_axes: LabelAxes | None = None


def apply_model(
    placed: PlacedModel,
    values: Params,
    batch: Batch,
    *,
    key: jax.Array | None = None,
    return_attention: bool = False,
) -> tuple[Prediction, Params]:
    """Apply a model to a batch inside jit.

    Training, pruning, evaluation, prediction, explanations and exports all call this function. Padding and sharding are
    therefore equal for all of them.

    Args:
      values: all values of the model, placed as `placed` says.
      batch: a batch of `data.pipeline`. If it has cached features instead of `image`, the backbone is not applied.
        `label` is needed only with `key`.
      key: None for evaluation. With a key the model is in training mode: all random numbers are drawn from the key, and
        heads that learn from the labels read `batch["label"]`.
      return_attention: include attention maps in the prediction.

    Returns:
      The prediction, and the batch statistics {path: value} after the forward pass.
    """
    definition, preprocess = placed.definition, placed.preprocess
    model = definition.merge(remove_padding(values, placed.label_axes))
    options: dict[str, Any] = {"return_attention": True} if return_attention else {}
    if key is not None:
        _, model_key = jax.random.split(key)  # the first half mixes the batch, see training.step
        model.train()  # merged modules are in evaluation mode
        options |= {"labels": batch["label"], "rngs": nnx.Rngs(model_key)}
    with partition.use_mesh(placed.mesh):
        if CELLS in batch:
            prediction = classify_mosaics(model, preprocess(batch["image"]), batch, rngs=options["rngs"])
        elif "image" in batch:
            image = preprocess(batch["image"])
            prediction = model(image, **options)
            if preprocess.flips and key is None:
                prediction = average_logits(prediction, model(image[:, :, ::-1]), model.softmax)
        else:
            prediction = model.classify(Features.from_arrays(batch), **options)
    return prediction, definition.read_stats(model)


def average_logits(prediction: Prediction, mirrored: Prediction, softmax: AttributeSoftmax) -> Prediction:
    """Return a prediction with the mean logits of the images and their mirror images; of attributes, before softmax."""
    first, second = softmax.logarithms(prediction.logits), softmax.logarithms(mirrored.logits)
    return replace(prediction, logits=softmax((first + second) / 2))


def make_eval_step(
    placed: PlacedModel, *, returns: Collection[str] = ()
) -> Callable[[Params, Params, Batch], dict[str, Any]]:
    """Return the jitted step for evaluation and prediction, step(values, frozen, batch).

    `values` are the trainable parameters and the batch statistics, `frozen` are the frozen parameters, and `batch` is a
    batch of `data.pipeline`. The step returns a dictionary with `logits` f32[B,K], with `id` and `mask` of the batch,
    and with `returns`: fields of Prediction, such as the gates {name: f32[B or 1,K,E]}, or "image" of the batch.
    Features, attention and maps need a batch of images. Every process receives the results of the global batch.
    """
    explains = not {"gates", "image"}.issuperset(returns)

    def step(values: Params, frozen: Params, batch: Batch) -> dict[str, Any]:
        values = {**values, **frozen}
        prediction, _ = apply_model(placed, values, batch, return_attention=explains)
        known = {**batch, **vars(prediction)}
        return {name: known[name] for name in ("logits", "id", "mask", *returns)}

    return jit_step(step, placed.mesh)


def make_feature_step(
    definition: ModelDef, preprocess: Preprocess, mesh: Mesh
) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """Return the jitted step that computes features, step(values, batch), for a batch of images.

    `values` are the values of the backbone and of the prompts (if the model has prompts), replicated on the mesh. The
    step returns a dictionary with the arrays of `Features.arrays` for the features that the head reads, and with `id`
    and `mask` of the batch. Every process receives the results of the global batch.
    """

    def step(values: Params, batch: Batch) -> dict[str, jax.Array]:
        features = definition.merge(definition.shapes(), values).encode(preprocess(batch["image"]))
        return {**features.arrays(), "mask": batch["mask"], "id": batch["id"]}

    return jit_step(step, mesh)


def jit_step(step: Callable, mesh: Mesh) -> Callable:
    """Return the jitted step of a model, whose results every process receives."""
    options = compiler_options(mesh.devices.flat[0].platform)
    return jax.jit(step, out_shardings=NamedSharding(mesh, REPLICATED), compiler_options=options)
