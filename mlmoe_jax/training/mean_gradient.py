"""The mean gradient of the training loss over one epoch, at constant values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from mlmoe_jax.data.label_matrix import LabelMatrix
from mlmoe_jax.data.labels.hidden import hide_positives
from mlmoe_jax.data.pipeline import steps_per_epoch
from mlmoe_jax.data.prepare import Batch
from mlmoe_jax.data.split import SkippedImages
from mlmoe_jax.models.apply import apply_model, jit_step
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.batches import run_batches
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.training.experiment import training_batches
from mlmoe_jax.training.objective import Objective, training_labels


def mean_gradient(run: Run, paths: Sequence[str], task: str) -> dict[str, np.ndarray]:
    """Return path -> the mean of the gradients of all training batches of one epoch, in f64.

    Args:
      run: the trained model.
      paths: the values with respect to which the loss is differentiated.
      task: the name of the bar that shows the progress.
    """
    config = run.config
    split = hide_positives(run.open_split(config.data.train_split), config.data)
    size = config.train.batch_size
    steps = steps_per_epoch(len(split), size)
    step = _gradient_step(run, paths, split.labels)
    total = {path: np.zeros(run.values[path].shape) for path in paths}
    keys = map(jax.random.key, itertools.count(config.seed))
    batches = itertools.islice(training_batches(config, split, SkippedImages(split)), steps)
    for gradient in run_batches(
        lambda batch: step(run.values, run.frozen, batch, next(keys)),
        batches,
        run.mesh,
        advice="lower train.batch_size",
        progress=Progress(task, steps, size),
    ):
        for path, value in gradient.items():
            total[path] += value
    return {path: value / steps for path, value in total.items()}


def _gradient_step(run: Run, paths: Sequence[str], labels: LabelMatrix) -> Callable[..., Params]:
    """Return a jitted function of the values, the frozen values, a batch and a random key: path -> gradient.

    Args:
      labels: i8[N,K], label codes of the training split.
    """
    training = training_labels(run.config, labels, run.label_space.names, run.label_space.tree)
    objective = Objective(run.config.loss, training)

    def loss_of(varied: Params, values: Params, frozen: Params, batch: Batch, key: jax.Array) -> jax.Array:
        values = {**values, **frozen} | varied
        prediction, _ = apply_model(run, values, batch, key=key)
        return objective(prediction, batch)[0]

    def step(values: Params, frozen: Params, batch: Batch, key: jax.Array) -> Params:
        return jax.grad(loss_of)({path: values[path] for path in paths}, values, frozen, batch, key)

    return jit_step(step, run.mesh)
