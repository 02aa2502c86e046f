"""The forward step of evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mlmoe_jax.data.prepare import Batch, Preprocess, prepare
from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import Prediction
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.runtime import sharding
from mlmoe_jax.runtime.sharding import LabelAxes, unpadded


def probabilities(logits: np.ndarray) -> np.ndarray:
    """σ of f32[...] in float64, without overflow."""
    logits = np.asarray(logits, np.float64)
    return np.exp(-np.logaddexp(0, -logits))


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
