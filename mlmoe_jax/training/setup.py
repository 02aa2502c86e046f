"""The data, the model and the compiled steps of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config.validation import has_batch_statistics
from mlmoe_jax.data.image_cache import with_cache
from mlmoe_jax.data.labels.space import LabelSpace, label_space_of, synthetic_label_space
from mlmoe_jax.data.pipeline import SkippedImages, build_loader, steps_per_epoch
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.sources.open import count_labels, open_splits, original_name, root_of
from mlmoe_jax.data.split import UNKNOWN, Split
from mlmoe_jax.data.split_checks import check_splits, require_readable
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.evaluate import measure, score_split
from mlmoe_jax.evaluation.fit_thresholds import split_to_fit
from mlmoe_jax.evaluation.gate_shares import shared_entries
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.inference.features import FeatureExtractor, require_frozen
from mlmoe_jax.models.adapters.catalog import prompts_of
from mlmoe_jax.models.apply import make_eval_step
from mlmoe_jax.models.heads.catalog import head_of
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.runs.assemble import Parts, abstract_parts, evaluated_definition, label_axes_for, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import read_label_space, restored_values
from mlmoe_jax.runtime import distributed, sharding
from mlmoe_jax.runtime.batches import device_batches
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.sharding import LabelAxes
from mlmoe_jax.runtime.text import counted
from mlmoe_jax.training.objective import training_objective
from mlmoe_jax.training.optim import make_optimizer, make_schedules
from mlmoe_jax.training.profiling import Window
from mlmoe_jax.training.selection import selection_split
from mlmoe_jax.training.step import TrainState, TrainStep, initial_state, make_train_step

# A length of training that no warm-up exceeds; shapes and costs of the steps do not depend on it.
ANY_LENGTH = 10**9


# -------------------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class TrainingData:
    """The opened splits of a training.

    eval_splits: the splits to evaluate at the end, by name. selection_split: the name of the one to evaluate during
    training; "" = none. skipped: images of the training split that could not be read.
    """

    train_split: Split
    eval_splits: dict[str, Split]
    selection_split: str
    label_space: LabelSpace
    skipped: SkippedImages
    steps_per_epoch: int


def open_data(config: ConfigDict, folder: RunFolder, *, resumes: bool) -> TrainingData:
    """Open the splits of a training, and print warnings about them and about the config.

    resumes: take the label space from the run in the folder. Another version of a library may group labels differently,
    and a file of word vectors may have changed, but a model keeps the label space that it was trained with.
    Raises UserError if the data cannot be used for training, or if its labels are not those of the run.
    """
    selecting = selection_split(config)
    fitting = split_to_fit(config) if config.thresholds.at_end else ""
    names = [name for name in (selecting, fitting, *config.data.test_splits) if name]
    status(f"reading {config.data.name}")
    splits = open_splits(config.data, names, seed=config.seed)
    _tell_missing(config.data.name, splits.values())
    require_readable(splits.values(), config.data)
    train_split, eval_splits = splits[config.data.train_split], {name: splits[name] for name in names}
    if resumes:
        label_space = read_label_space(folder)
        if label_space.names != tuple(train_split.classes):
            raise UserError(f"{folder} holds a run on other labels than the data has now; train in another --workdir")
        if label_space.images != len(train_split):
            status(
                f"warning: the run in {folder} started with {label_space.images:,} training images and now has "
                f"{len(train_split):,}, so it continues with another order of images"
            )
    else:
        label_space = label_space_for(config, train_split)
    if head_of(config).unknown_labels and (train_split.labels == UNKNOWN).any():
        status(f"warning: {config.model.head.kind} {head_of(config).unknown_labels}")
    for warning in [*configuration.warnings(config), *check_splits(train_split, list(eval_splits.values()))]:
        status(f"warning: {warning}")
    where = f" in {root}" if (root := root_of(config.data)) else ""
    images, labels = counted(len(train_split), "training image"), counted(len(label_space.names), "label")
    status(f"{config.data.name}{where}: {images}, {labels}")
    return TrainingData(
        train_split,
        eval_splits,
        selecting,
        label_space,
        SkippedImages(train_split),
        steps_per_epoch(len(train_split), config.train.batch_size),
    )


def _tell_missing(name: str, splits: Iterable[Split]) -> None:
    """Print in one line how many images were left out because they have no file; all processes must call it.

    Raises UserError if the processes do not find the same images.
    """
    counts = {split.name: [len(split), len(split.missing) if split.missing else 0] for split in splits}
    for other in distributed.gather(counts):
        if other != counts:
            raise UserError(
                f"the processes find different images of {name} ({counts} and {other}); give all hosts the same files"
            )
    parts = [f"{lost:,} of the {lost + left:,} images of {split}" for split, (left, lost) in counts.items() if lost]
    if parts:
        status(f"{name}: {' and '.join(parts)} have no file and are left out")


def with_caches(
    config: ConfigDict,
    data: TrainingData,
    parts: Parts,
    preprocess: Preprocess,
    mesh: Mesh,
    *,
    resumed: RunFolder | None = None,
) -> TrainingData:
    """Return the data with features, or decoded images, from a cache, as `data.cache_features` and `data.cache` say.

    What is not in the cache is computed.

    Args:
      config: of the training.
      data: of `open_data`.
      parts: the model; its backbone computes the features.
      preprocess: as `preprocess_for` returns it.
      mesh: where features are computed.
      resumed: the folder of the run, if it resumes; its checkpoint has the statistics of the backbone.

    Raises:
      UserError: training would change the features, or there is no space for the cache.
    """
    splits = [(data.train_split, config.augment), *((split, None) for split in data.eval_splits.values())]
    if config.data.cache_features != "no":
        require_frozen(parts)
        if resumed and parts.stats:
            selected = restored_values(resumed, parts, mesh).selected
            parts = replace(parts, stats={path: selected[path] for path in parts.stats})
        extractor = FeatureExtractor(config, parts, preprocess, mesh)
        splits = [(extractor.cached(split), augment) for split, augment in splits]
    cached = [split for split, _ in splits] if config.data.cache == "none" else with_cache(splits, config.data)
    return replace(data, train_split=cached[0], eval_splits=dict(zip(data.eval_splits, cached[1:], strict=True)))


def training_batches(
    config: ConfigDict, split: Split, skipped: SkippedImages, *, first_step: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Return this process's part of the training batches after `first_step` steps.

    skipped: collects the images that could not be read.
    """
    data_config = config.data
    if has_batch_statistics(config):  # the blank of an unreadable image would be in them
        data_config = data_config.copy_and_resolve_references()
        data_config.bad_images = "error"
    loader = build_loader(
        data_config,
        split,
        batch_size=config.train.batch_size,
        augment=config.augment,
        seed=config.seed,
        first_step=first_step,
        process=distributed.process(),
    )
    return skipped.watch(loader)


def label_space_for(config: ConfigDict, train_split: Split) -> LabelSpace:
    """Return the label space of a new run on a training split."""
    vectors = head_of(config).needs_vectors
    grouped = prompts_of(config).uses_groups
    name = original_name(config.data)
    return label_space_of(train_split, name, config.model, config.seed, grouped=grouped, vectors=vectors)


# ------------------------------------------------------------------------------------------------------------- steps
@dataclass(frozen=True)
class Steps:
    """The optimizer and the compiled steps for one model on one mesh.

    learning_rate: number of steps taken -> f32[], jitted. train_step: see TrainStep. eval_step: see `make_eval_step`.
    """

    num_labels: int
    mesh: Mesh
    label_axes: LabelAxes | None
    preprocess: Preprocess
    total_steps: int
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[int], jax.Array]
    train_step: TrainStep
    eval_step: Callable[..., dict[str, Any]]

    def initial_state(self, parts: Parts) -> TrainState:
        """Return the state of a model before its first step, not yet placed on the mesh."""
        opt = jax.jit(self.optimizer.init)(parts.trainable)
        return initial_state(parts.trainable, parts.frozen, parts.stats, opt)

    def awaited_state(self, parts: Parts) -> TrainState:
        """Return the state of a model whose trainable parameters and statistics are ShapeDtypeStructs.

        All of it but its frozen weights, which are placed, is ShapeDtypeStructs with shardings.
        """
        awaited = jax.eval_shape(self.initial_state, parts).replace(frozen={})
        awaited = sharding.abstract(awaited, self.mesh, self.label_axes)
        return awaited.replace(frozen=self.place(parts.frozen))

    def place(self, tree: Any) -> Any:
        """Place a tree of values on the mesh as the steps expect them."""
        return sharding.place(tree, self.mesh, self.label_axes)

    def stored_form(self, placed: Any) -> Any:
        """Return placed values as checkpoints store them, which does not depend on the mesh."""
        return sharding.without_padding(placed, self.mesh, self.label_axes)


def build_steps(
    config: ConfigDict,
    parts: Parts,
    preprocess: Preprocess,
    mesh: Mesh,
    train_labels: np.ndarray,
    *,
    total_steps: int,
    evaluated: ModelDef | None = None,
) -> Steps:
    """Build the optimizer and the steps of a config for a model, which may be abstract, without compiling them.

    train_labels: codes i8[N,K] of the training split, for the weights of a balanced loss. evaluated: the structure for
    evaluation, from `evaluated_definition`; None = the one for training.
    """
    num_labels = train_labels.shape[1]
    label_axes = label_axes_for(parts.definition, num_labels, mesh)
    optimizer = make_optimizer(config.optim, total_steps, parts.trainable)
    learning_rate, _ = make_schedules(config.optim, total_steps)
    train_step = make_train_step(
        parts.definition,
        training_objective(config, train_labels),
        optimizer,
        preprocess,
        ema_decay=config.ema.decay,
        seed=config.seed,
        mesh=mesh,
        label_axes=label_axes,
        accumulate=config.train.accumulate,
        skips=bool(config.train.skip_nonfinite),
    )
    return Steps(
        num_labels=num_labels,
        mesh=mesh,
        label_axes=label_axes,
        preprocess=preprocess,
        total_steps=total_steps,
        optimizer=optimizer,
        learning_rate=jax.jit(learning_rate),
        train_step=train_step,
        eval_step=make_eval_step(
            evaluated or parts.definition, preprocess, mesh, label_axes, shared=shared_entries(config)
        ),
    )


def abstract_steps(config: ConfigDict, mesh: Mesh, num_labels: int = 0) -> tuple[Parts, Steps]:
    """Return a config's model and steps without data or weights; every value is a ShapeDtypeStruct.

    num_labels: 0 = the number of labels of the data set. Raises UserError if that number is unknown without the data.
    """
    space = synthetic_label_space(num_labels or count_labels(config.data), config.model.prompts.num_groups)
    parts, labels = abstract_parts(config, space), np.zeros((1, len(space.names)), np.int8)
    evaluated, preprocess = evaluated_definition(config, parts, space), preprocess_for(config)
    steps = build_steps(config, parts, preprocess, mesh, labels, total_steps=ANY_LENGTH, evaluated=evaluated)
    return parts, steps


# -------------------------------------------------------------------------------------------------------- experiment
@dataclass(frozen=True)
class Experiment:
    """The constant parts of a training: its values are in a `TrainState`. profile: the steps to trace, if any."""

    config: ConfigDict
    folder: RunFolder
    data: TrainingData
    steps: Steps
    profile: Window | None = None

    def batches(self, first: int, progress: Progress) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        """Yield the number and the batch, on the devices, of each step after the first `first` steps."""
        batches = training_batches(self.config, self.data.train_split, self.data.skipped, first_step=first)
        return zip(
            range(first + 1, self.steps.total_steps + 1),
            device_batches(batches, self.steps.mesh, progress),
            strict=False,
        )

    def evaluates(self, step: int) -> bool:
        """Return whether the state after a step is evaluated."""
        return step % (self.config.eval.every_epochs * self.data.steps_per_epoch) == 0 or step == self.steps.total_steps

    def saves(self, step: int) -> bool:
        """Return whether the state after a step is saved, besides at the end and when training is stopped."""
        every = max(1, round(self.config.checkpoint.every_epochs * self.data.steps_per_epoch))
        return step % every == 0 or step == self.steps.total_steps

    def score(self, candidates: Mapping[str, Params], frozen: Params, split: Split) -> dict[str, SplitScores]:
        """Return the scores of a split for each of the given values, in one pass over its images."""
        return score_split(self.steps.eval_step, candidates, frozen, split, self.config, self.steps.mesh)

    def measure(self, scored: SplitScores) -> dict[str, float]:
        """Return the metrics of a scored split."""
        return measure(scored, self.data.label_space, self.config)
