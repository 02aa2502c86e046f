"""The training loss of a config."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.prepare import Batch
from mlmoe_jax.data.split import targets
from mlmoe_jax.models import losses
from mlmoe_jax.models.catalog import LOSSES
from mlmoe_jax.models.outputs import Prediction

Metrics = dict[str, jax.Array]
Objective = Callable[..., tuple[jax.Array, Metrics]]  # (prediction, batch, whole batch), see make_objective


def make_objective(settings: ConfigDict, balance: Callable[[], jax.Array] | None = None) -> Objective:
    """Build the training loss from `config.loss`: a weighted sum over the named terms, plus the model's penalties.

    The objective takes a prediction, its batch, and the whole batch if the batch is a part of it. The losses of the
    parts then add up to the loss of the whole batch.

    Args:
      settings: `config.loss`.
      balance: returns the weight of positives per label, f32[K], for losses with `positive_weight=0`.
    """
    per_element = LOSSES[settings.kind](settings, balance)
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
        total: Any = sum(weights.get(name, 1.0) * part for name, part in parts.items())
        return total, {f"loss/{name}": part for name, part in parts.items()}

    return objective


def training_objective(config: ConfigDict, labels: np.ndarray) -> Objective:
    """Return the training loss of a config. A balanced loss needs `labels`, the codes i8[N,K] of the training split."""
    return make_objective(config.loss, lambda: _negatives_over_positives(labels, config.data.difficult_train))


def _negatives_over_positives(labels: np.ndarray, difficult: str) -> jax.Array:
    """Return known negatives / positives per label, f32[K]; 1 for labels without positives."""
    positives, known = (np.zeros(labels.shape[1]) for _ in range(2))
    for rows in np.array_split(labels, max(1, len(labels) // 10_000)):
        label, mask = targets(rows, difficult)
        positives += (label * mask).sum(axis=0)
        known += mask.sum(axis=0)
    weight = np.where(positives > 0, (known - positives) / np.maximum(positives, 1), 1.0)
    return jnp.asarray(np.maximum(weight, 1e-3), jnp.float32)
