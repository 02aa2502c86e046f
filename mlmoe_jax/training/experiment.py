"""An experiment: the data, the model and the compiled steps of a training, without the training state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.config.validation import has_batch_statistics
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.split import SkippedImages, Split
from mlmoe_jax.inference.feature_extractor import FeatureExtractor, require_frozen
from mlmoe_jax.runs.assemble import Parts, evaluated_definition
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import restored_values
from mlmoe_jax.runtime.batches import device_batches
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.training.build_steps import ANY_LENGTH, Steps, build_steps
from mlmoe_jax.training.profiling import Window
from mlmoe_jax.training.training_data import TrainingData, with_features


@dataclass(frozen=True)
class Experiment:
    """The data, the model and the compiled steps of a training. The changing values are in `TrainState`."""

    config: ConfigDict
    folder: RunFolder
    data: TrainingData
    steps: Steps
    profile: Window | None = None  # the training steps to record with the JAX profiler; None = no profile

    @property
    def steps_per_epoch(self) -> int:
        """The number of training steps per pass over the training split."""
        return self.data.labels.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole training. It is 1 for a fit to convergence."""
        return self.config.train.epochs * self.steps_per_epoch if fits_by_steps(self.config) else 1

    def batches(self, first: int, progress: Progress) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        """Yield (step number, batch on the devices) for all steps after step `first`."""
        batches = training_batches(self.config, self.data.train_split, self.data.skipped, first_step=first)
        numbers = range(first + 1, self.total_steps + 1)
        return zip(numbers, device_batches(batches, self.steps.mesh, progress), strict=False)

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated after step `step`."""
        return step % (self.config.eval.every_epochs * self.steps_per_epoch) == 0 or step == self.total_steps

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is scheduled after step `step`. A requested stop saves one after any step."""
        every = max(1, round(self.config.checkpoint.every_epochs * self.steps_per_epoch))
        return step % every == 0 or step == self.total_steps


def fits_by_steps(config: ConfigDict) -> bool:
    """Return whether the parameters are trained by steps of the optimizer, not by a fit to convergence."""
    return config.train.fit == "steps"


def make_experiment(
    config: ConfigDict,
    folder: RunFolder,
    data: TrainingData,
    parts: Parts,
    preprocess: Preprocess,
    mesh: Mesh,
    *,
    resumes: bool = False,
    profile: Window | None = None,
) -> Experiment:
    """Return the experiment of a model on opened data.

    If `data.cache_features` is set, the features of all images are computed, or read from the cache. If the training
    `resumes`, this is done with the batch statistics of the checkpoint.

    Raises:
      UserError: features are cached although the backbone is trainable, or the disk has too little space for the
        features.
    """
    evaluated = evaluated_definition(config, parts, data.label_space)
    total_steps = ANY_LENGTH  # a fit takes no warm-up
    if fits_by_steps(config):
        total_steps = config.train.epochs * data.labels.steps_per_epoch
    steps = build_steps(config, parts, preprocess, mesh, data.labels, total_steps=total_steps, evaluated=evaluated)
    if config.data.cache_features != "no":
        require_frozen(parts)
        if resumes and parts.stats:
            selected = restored_values(folder, parts, mesh).selected
            parts = replace(parts, stats={path: selected[path] for path in parts.stats})
        data = with_features(data, FeatureExtractor(config, parts, preprocess, mesh))
    return Experiment(config, folder, data, steps, profile)


def training_batches(
    config: ConfigDict, split: Split, skipped: SkippedImages, *, first_step: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Return an iterator over this process's part of the training batches.

    `skipped` receives the images that could not be read. The batches of the first `first_step` steps are omitted.
    """
    data_config = config.data
    if has_batch_statistics(config):  # they would include the blank of an unreadable image
        data_config = data_config.copy_and_resolve_references()
        data_config.bad_images = "error"
    loader = build_loader(
        data_config,
        split,
        batch_size=config.train.batch_size,
        augment=config.augment,
        seed=config.seed,
        first_step=first_step,
    )
    return skipped.watch(loader)
