"""The objective of a training: the loss of a config plus the penalties of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_matrix import LabelCodes, LabelMatrix
from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.data.pipeline import steps_per_epoch
from mlmoe_jax.data.prepare import Batch
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import losses
from mlmoe_jax.models.attributes import AttributeSoftmax
from mlmoe_jax.models.loss_catalog import LOSSES
from mlmoe_jax.models.losses import LOSS_VALUES
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.models.params import Params
from mlmoe_jax.training.label_prior import read_prior

StepMetrics = dict[str, jax.Array]


class Objective:
    """The training loss of `config.loss`: a weighted sum of the named terms, plus the penalties of the model.

    Some losses keep values per training image, arrays with a row per image at paths that start with `loss/`: the
    optimizer updates the `learned` ones, and the method `note` the `noted` ones.
    """

    def __init__(self, settings: ConfigDict, training: TrainingLabels | None = None):
        kind = LOSSES[settings.kind]
        self.settings, self.loss = settings, kind(settings, training)
        self.steps_per_epoch = 1 if training is None else training.steps_per_epoch
        self.assumes_negatives = kind.reads_negatives(settings)
        self.tags = slice(None) if training is None else training.tags
        self.weights = {name: weight for name, weight in settings.terms.items() if weight}

    def learned_paths(self) -> list[str]:
        """Return the paths of the values of the loss that the optimizer updates."""
        return [LOSS_VALUES + name for name in self.loss.trained_names]

    def learned(self) -> dict[str, np.ndarray]:
        """Return path -> initial value, for the values of the loss that the optimizer updates."""
        return {LOSS_VALUES + name: values for name, values in self.loss.trained_values().items()}

    def noted(self) -> dict[str, np.ndarray]:
        """Return path -> initial value, for the values of the loss that `note` updates."""
        return {LOSS_VALUES + name: values for name, values in self.loss.tracked_values().items()}

    def __call__(
        self,
        prediction: Prediction,
        batch: Batch,
        whole: Batch | None = None,
        *,
        step: jax.Array | int = 0,
        values: Mapping[str, jax.Array] | None = None,
    ) -> tuple[jax.Array, StepMetrics]:
        """Compute the loss.

        Args:
          batch: a batch, or a part of it under gradient accumulation.
          whole: the whole batch, if `batch` is a part. The losses of all parts then add up to the loss of the whole
            batch. A loss that compares images is an exception, because it sees only the images of a part. None =
            `batch` is whole.
          step: the number of steps already taken.
          values: path -> learned or noted value of the loss; None if the loss keeps no values.

        Returns:
          The loss f32[], and its terms and penalties before weighting, `loss/NAME` -> f32[].
        """
        settings, whole = self.settings, batch if whole is None else whole
        logits, examples = {"logits": prediction.logits, **prediction.terms}, self._examples(batch, step, values)
        entries, images = self._divisors(whole)
        parts = {
            name: losses.reduce(
                self._element_losses(losses.as_float(logits[name]), batch["label"], examples),
                self._counted(batch),
                batch["mask"],
                how=settings.reduce,
                scale=settings.scale,
                count=entries,
            )
            for name in self.weights
        }
        parts |= {
            name: losses.reduce(value[:, None], jnp.ones_like(value)[:, None], batch["mask"], count=images)
            for name, value in prediction.penalties.items()
        }
        total: Any = sum(self.weights.get(name, 1.0) * part for name, part in parts.items())
        return total, {f"loss/{name}": part for name, part in parts.items()}

    def _element_losses(self, logits: jax.Array, labels: jax.Array, examples: losses.Examples) -> jax.Array:
        """Return the loss per element. For the values of attributes, it is the cross-entropy of the softmax.

        The loss of the config has the tags alone, since it may compare labels of an image.
        """
        elements = self.loss(logits[:, self.tags], examples)
        if isinstance(self.tags, slice):
            return elements
        return (-labels * jax.nn.log_sigmoid(logits)).at[:, self.tags].set(elements)

    def note(self, prediction: Prediction, batch: Batch, step: jax.Array, values: Params) -> Params:
        """Return path -> new value, for the noted values of the loss, after the step that follows `step` steps.

        `values` has path -> learned or noted value before that step.
        """
        logits = losses.as_float(prediction.logits)[:, self.tags]
        noted = self.loss.track(logits, self._examples(batch, step, values))
        # A batch that begins an epoch can have an image twice, so the maximum of both rows counts.
        return {
            (path := LOSS_VALUES + name): values[path].at[batch["id"]].max(after * (batch["mask"] != 0)[:, None])
            for name, after in noted.items()
        }

    def _divisors(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the number of elements [B,K] in the mean of the loss, i32[], and the number of images, i32[]."""
        averaged = jnp.ones_like(batch["label_mask"]) if self.loss.averages_all else self._counted(batch)
        return jnp.sum(losses.valid_entries(averaged, batch["mask"])), jnp.sum(batch["mask"] != 0)

    def _counted(self, batch: Batch) -> jax.Array:
        """Return [B,K]: 1 for each label that is included in the loss, and 0 for each label that is ignored."""
        return jnp.ones_like(batch["label_mask"]) if self.assumes_negatives else batch["label_mask"]

    def _examples(self, batch: Batch, step: Any, values: Mapping[str, jax.Array] | None) -> losses.Examples:
        """Return the tags of a batch, and the values that the loss has for them."""
        if values is None and self.loss.keeps_values:
            raise UserError(f"loss.kind={self.settings.kind} has values per training image, which only a training has")
        tables = {path.removeprefix(LOSS_VALUES): table for path, table in (values or {}).items()}
        return losses.Examples(
            jnp.asarray(batch["label"])[:, self.tags],
            jnp.asarray(batch["label_mask"])[:, self.tags] != 0,
            jnp.asarray(batch["mask"]) != 0,
            step // self.steps_per_epoch,
            {name: table[batch["id"]] for name, table in tables.items()},
        )


def training_labels(
    config: ConfigDict, codes: LabelCodes, names: Sequence[str] = (), tree: LabelTree = INDEPENDENT
) -> TrainingLabels:
    """Return what a loss may use of the training labels.

    `codes` i8[N,K] are the label codes of the training split, and `names` are the names of the labels, for which
    `loss.prior` is read. Without names, it is not read. `tree` has their attributes, whose values are left out.
    """
    steps, tags = steps_per_epoch(len(codes), config.train.batch_size), slice(None)
    if softmax := AttributeSoftmax.of(tree.attributes, codes.shape[1]):
        tags = np.flatnonzero(~softmax.is_value)
        codes = LabelMatrix.of(codes).choose(tags)
    prior = read_prior(config, np.array(names)[tags].tolist()) if names else None
    return TrainingLabels(codes, config.data.difficult_train, steps, config.seed, prior, tags)


def require_labels(config: ConfigDict, labels: TrainingLabels) -> None:
    """Raise UserError if the loss of a config cannot be computed or learned from the training labels."""
    if any(config.loss.terms.values()) and (mistakes := LOSSES[config.loss.kind].label_mistakes(config, labels)):
        raise UserError("; ".join(mistakes))
