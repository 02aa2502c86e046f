"""The data, the model and the compiled steps of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from mlmoe_jax.data.labels.hidden import hide_positives
from mlmoe_jax.data.labels.space import LabelSpace, label_space_of, synthetic_label_space
from mlmoe_jax.data.pipeline import SkippedImages, build_loader, steps_per_epoch
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.sources.open import count_labels, open_splits, original_name, root_of, tree_of
from mlmoe_jax.data.split import POSITIVE, UNKNOWN, Split
from mlmoe_jax.data.split_checks import check_splits, require_readable, require_same_images
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.fit_thresholds import split_to_fit
from mlmoe_jax.evaluation.gate_shares import shared_entries
from mlmoe_jax.evaluation.results import OUT_OF_FOLD
from mlmoe_jax.inference.features import FeatureExtractor, require_frozen
from mlmoe_jax.models.apply import make_eval_step
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.registries import LOSSES, head_class, prompts_class
from mlmoe_jax.runs.assemble import Parts, abstract_parts, evaluated_definition, label_axes_for, preprocess_for
from mlmoe_jax.runs.folder import RunFolder, read_label_space
from mlmoe_jax.runs.restore import restored_values
from mlmoe_jax.runtime import distributed, sharding
from mlmoe_jax.runtime.batches import device_batches
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.sharding import LabelAxes
from mlmoe_jax.runtime.text import quantity
from mlmoe_jax.training.mixing import make_mixing
from mlmoe_jax.training.objective import Objective, require_labels, training_objective
from mlmoe_jax.training.optim import make_optimizer, make_schedules
from mlmoe_jax.training.profiling import Window
from mlmoe_jax.training.selection import selection_split
from mlmoe_jax.training.step import TrainState, TrainStep, initial_state, make_train_step

# More steps than any warm-up has; shapes and costs of the compiled steps do not depend on the number.
ANY_LENGTH = 10**9


# -------------------------------------------------------------------------------------------------------- experiment
@dataclass(frozen=True)
class Experiment:
    """A training without its values, which are in a `TrainState`.

    Attributes:
      train_split: the training split.
      eval_splits: the splits to evaluate, by name.
      label_space: names, groups and statistics of the labels.
      skipped: images of the training split that could not be read.
      steps: the compiled steps; None until there is a model.
      profile: steps to trace.
    """

    config: ConfigDict
    folder: RunFolder
    train_split: Split
    eval_splits: dict[str, Split]
    label_space: LabelSpace
    skipped: SkippedImages
    steps: Steps | None = None
    profile: Window | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps per pass over the training split."""
        return steps_per_epoch(len(self.train_split), self.config.train.batch_size)

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole training; a fit to convergence counts as one."""
        return self.config.train.epochs * self.steps_per_epoch if self.by_steps else 1

    @property
    def by_steps(self) -> bool:
        """Whether the parameters are fitted by steps of the optimizer."""
        return self.config.train.fit == "steps"

    def batches(self, first: int, progress: Progress) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        """Yield the number and the batch, on the devices, of each step after the first `first` steps."""
        batches = training_batches(self.config, self.train_split, self.skipped, first_step=first)
        numbers = range(first + 1, self.total_steps + 1)
        return zip(numbers, device_batches(batches, self.steps.mesh, progress), strict=False)

    def evaluates(self, step: int) -> bool:
        """Return whether the state after a step is evaluated."""
        return step % (self.config.eval.every_epochs * self.steps_per_epoch) == 0 or step == self.total_steps

    def saves(self, step: int) -> bool:
        """Return whether the state after a step is saved, besides at the end and when training is stopped."""
        every = max(1, round(self.config.checkpoint.every_epochs * self.steps_per_epoch))
        return step % every == 0 or step == self.total_steps


def open_experiment(
    config: ConfigDict, folder: RunFolder, *, resumes: bool = False, profile: Window | None = None
) -> Experiment:
    """Open the splits of a training, and print warnings about them and about the config.

    Args:
      resumes: take the label space from the run in the folder. It can differ from a new label space, because another
        version of a library may group labels differently, and a file of word vectors may have changed.
      profile: steps to trace.

    Raises:
      UserError: the data cannot be used for training, or its labels differ from the labels of the run.
    """
    fitting = split_to_fit(config) if config.thresholds.at_end else ""
    names = [selection_split(config), fitting, *config.data.test_splits]
    names = [name for name in names if name not in ("", OUT_OF_FOLD)]
    head, name = head_class(config), config.data.name
    status(f"reading {name}")
    splits = open_splits(config.data, names, seed=config.seed)
    require_same_images(name, splits.values())
    require_readable(splits.values(), config.data)
    train_split = hide_positives(splits[config.data.train_split], config.data)
    tree = tree_of(config.data, train_split.classes)
    train_split = replace(train_split, labels=tree.close(train_split.labels)[0])  # what known positives imply
    eval_splits = {name: splits[name] for name in names}
    require_labels(config, train_split.labels)
    space = read_label_space(folder) if resumes else label_space_for(config, train_split)
    if resumes and space.names != tuple(train_split.classes):
        raise UserError(f"{folder} holds a run on other labels than the data has now; train in another --workdir")
    if resumes and space.images != len(train_split):
        if LOSSES[config.loss.kind].keeps_values:
            raise UserError(
                f"{folder} started with {space.images:,} training images, each with values of loss.kind="
                f"{config.loss.kind}, and the data now has {len(train_split):,}; train in another --workdir"
            )
        status(
            f"warning: the run in {folder} started with {space.images:,} training images and now has "
            f"{len(train_split):,}, so it continues with another order of images"
        )
    elif resumes and ((space.positives != (train_split.labels == POSITIVE).sum(axis=0)).any() or space.tree != tree):
        status(f"warning: labels have changed since the run in {folder} started, so it continues with other labels")
    if head.unknown_labels and (train_split.labels == UNKNOWN).any():
        status(f"warning: {config.model.head.kind} {head.unknown_labels}")
    for warning in [*configuration.warnings(config), *check_splits(train_split, list(eval_splits.values()))]:
        status(f"warning: {warning}")
    where = f" in {root}" if (root := root_of(config.data)) else ""
    status(f"{name}{where}: {quantity(len(train_split), 'training image')}, {quantity(len(space.names), 'label')}")
    return Experiment(config, folder, train_split, eval_splits, space, SkippedImages(train_split), profile=profile)


def with_steps(experiment: Experiment, parts: Parts, preprocess: Preprocess, mesh: Mesh) -> Experiment:
    """Return the experiment with the steps of a model, which are not compiled yet."""
    config, labels = experiment.config, experiment.train_split.labels
    evaluated = evaluated_definition(config, parts, experiment.label_space)
    total_steps = experiment.total_steps if experiment.by_steps else ANY_LENGTH  # a fit takes no warm-up
    steps = build_steps(config, parts, preprocess, mesh, labels, total_steps=total_steps, evaluated=evaluated)
    return replace(experiment, steps=steps)


def with_caches(experiment: Experiment, parts: Parts, *, resumes: bool = False) -> Experiment:
    """Return the experiment with features or decoded images from a cache, if the config says so.

    Features and images that the cache lacks are computed.

    Args:
      experiment: the experiment with its steps.
      parts: the model, whose backbone computes the features.
      resumes: the checkpoint of the run has the statistics of the backbone.

    Raises:
      UserError: training would change the features, or there is no disk space.
    """
    config, evaluated, steps = experiment.config, experiment.eval_splits, experiment.steps
    splits = [(experiment.train_split, config.augment), *((split, None) for split in evaluated.values())]
    if config.data.cache_features != "no":
        require_frozen(parts)
        if resumes and parts.stats:
            selected = restored_values(experiment.folder, parts, steps.mesh).selected
            parts = replace(parts, stats={path: selected[path] for path in parts.stats})
        extractor = FeatureExtractor(config, parts, steps.preprocess, steps.mesh)
        splits = [(extractor.cached(split), augment) for split, augment in splits]
    cached = [split for split, _ in splits] if config.data.cache == "none" else with_cache(splits, config.data)
    return replace(experiment, train_split=cached[0], eval_splits=dict(zip(evaluated, cached[1:], strict=True)))


def training_batches(
    config: ConfigDict, split: Split, skipped: SkippedImages, *, first_step: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Return this process's part of the training batches after `first_step` steps; `skipped` collects bad images."""
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
        process=distributed.process(),
    )
    return skipped.watch(loader)


def label_space_for(config: ConfigDict, train_split: Split) -> LabelSpace:
    """Return the label space of a new run on a training split."""
    vectors = head_class(config).needs_vectors
    grouped = prompts_class(config).uses_groups
    name = original_name(config.data)
    space = label_space_of(train_split, name, config.model, config.seed, grouped=grouped, vectors=vectors)
    return replace(space, tree=tree_of(config.data, train_split.classes))


# ------------------------------------------------------------------------------------------------------------- steps
@dataclass(frozen=True)
class Steps:
    """The optimizer and the compiled steps for one model on one mesh.

    `averages`: whether a state has moving averages. `learning_rate` maps the number of steps taken to f32[].
    `eval_step` is a result of `make_eval_step`.
    """

    num_labels: int
    mesh: Mesh
    label_axes: LabelAxes | None
    preprocess: Preprocess
    optimizer: optax.GradientTransformation
    averages: bool
    objective: Objective
    learning_rate: Callable[[int], jax.Array]
    train_step: TrainStep
    eval_step: Callable[..., dict[str, Any]]

    def initial_state(self, parts: Parts) -> TrainState:
        """Return the state of a model before its first step, not yet placed on the mesh."""
        trainable = {**parts.trainable, **self.objective.learned()}
        stats = {**parts.stats, **self.objective.noted()}
        opt = jax.jit(self.optimizer.init)(trainable)
        return initial_state(trainable, parts.frozen, stats, opt, averages=self.averages)

    def start(self, parts: Parts, *, resumes: bool) -> TrainState:
        """Return the state before the first step, on the mesh.

        With `resumes`, values that a checkpoint holds are ShapeDtypeStructs with shardings.
        """
        state = jax.eval_shape(self.initial_state, parts) if resumes else self.initial_state(parts)
        if not resumes:
            return self.place(state)
        awaited = sharding.abstract(state.replace(frozen={}), self.mesh, self.label_axes)
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

    Args:
      parts: the model.
      train_labels: codes i8[N,K] of the training split, for a balanced loss.
      total_steps: number of steps of the whole training.
      evaluated: the structure for evaluation, from `evaluated_definition`; None = the structure for training.
    """
    num_labels = train_labels.shape[1]
    label_axes = label_axes_for(parts.definition, num_labels, mesh)
    objective = training_objective(config, train_labels)
    optimizer = make_optimizer(config.optim, total_steps, [*parts.trainable, *objective.learned_paths()])
    learning_rate, _ = make_schedules(config.optim, total_steps)
    train_step = make_train_step(
        parts.definition,
        objective,
        optimizer,
        preprocess,
        ema_decay=config.ema.decay,
        seed=config.seed,
        mesh=mesh,
        label_axes=label_axes,
        accumulate=config.train.accumulate,
        mixing=make_mixing(config.augment),
        skips=bool(config.train.skip_nonfinite),
    )
    return Steps(
        num_labels=num_labels,
        mesh=mesh,
        label_axes=label_axes,
        preprocess=preprocess,
        optimizer=optimizer,
        averages=bool(config.ema.decay),
        objective=objective,
        learning_rate=jax.jit(learning_rate),
        train_step=train_step,
        eval_step=make_eval_step(
            evaluated or parts.definition, preprocess, mesh, label_axes, shared=shared_entries(config)
        ),
    )


def abstract_steps(config: ConfigDict, mesh: Mesh, num_labels: int = 0) -> tuple[Parts, Steps]:
    """Return a config's model and steps without data or weights; every value is a ShapeDtypeStruct.

    `num_labels` is by default the number of labels of the data set; UserError if it is unknown without the data.
    """
    space = synthetic_label_space(num_labels or count_labels(config.data), config.model.prompts.num_groups)
    parts, labels = abstract_parts(config, space), np.zeros((1, len(space.names)), np.int8)
    evaluated, preprocess = evaluated_definition(config, parts, space), preprocess_for(config)
    steps = build_steps(config, parts, preprocess, mesh, labels, total_steps=ANY_LENGTH, evaluated=evaluated)
    return parts, steps
