"""The data of a training: its splits and its label space. They are opened and checked before the model is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.data.label_codes import POSITIVE, UNKNOWN
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.data.labels.hidden import hide_positives
from mlmoe_jax.data.labels.space import LabelSpace, compute_label_space
from mlmoe_jax.data.sources.catalog import DATA_SETS
from mlmoe_jax.data.sources.label_categories import read_categories
from mlmoe_jax.data.sources.named_files import find_root, resolve_path
from mlmoe_jax.data.sources.open import open_splits, original_name
from mlmoe_jax.data.split import SkippedImages, Split
from mlmoe_jax.data.split_checks import check_splits, require_readable, require_same_images, sample_digests
from mlmoe_jax.data.twins import shared_twins
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.decisions.threshold_fit import split_to_fit
from mlmoe_jax.evaluation.results import OUT_OF_FOLD
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.inference.text_encoder import vectors_for
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.loss_catalog import LOSSES
from mlmoe_jax.runs.folder import RunFolder, read_config, read_label_space, training_finished
from mlmoe_jax.runs.image_record import ImageRecord, describe_leak, read_image_record
from mlmoe_jax.runs.origin import Origin
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import abbreviate, quantity
from mlmoe_jax.training.initialization import Resumed, RunOrigin
from mlmoe_jax.training.objective import require_labels, training_labels
from mlmoe_jax.training.selection import selection_split

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """The splits and the label space of a training."""

    train_split: Split
    labels: TrainingLabels  # of the training split
    eval_splits: dict[str, Split]  # name -> split, for all splits to evaluate
    label_space: LabelSpace  # the names, groups and statistics of the labels
    skipped: SkippedImages  # the images of the training split that could not be read
    images: ImageRecord  # the record of the images, for the run folder
    reordered: bool = False  # whether a resumed run has other training images than before, or another order of them


def open_training_data(config: ConfigDict, origin: Origin | None = None) -> TrainingData:
    """Open the splits of a training, check them, and log warnings about the data and the config.

    Args:
      origin: the origin of the initial values; None = the pretrained backbone, or random values. The label space of a
        resumed run is read from its folder, because a recomputed label space can differ: another version of a library
        may group labels differently, and the file of word vectors may have changed.

    Raises:
      UserError: the data cannot be used for training, its labels differ from the labels of the resumed run, or the
        resumed run was trained on images that are now to be evaluated.
    """
    status(f"reading {config.data.name}")
    names = evaluated_splits(config)
    splits = open_splits(config.data, names, seed=config.seed)
    require_same_images(config.data.name, splits.values())
    require_readable(splits.values(), config.data)
    train_split = hide_positives(splits[config.data.train_split], config.data)
    labels = training_labels(config, train_split.labels, train_split.classes, train_split.tree)
    require_labels(config, labels)
    eval_splits = {name: splits[name] for name in names}
    images, reordered = _record_images(config, train_split, eval_splits, origin)
    if isinstance(origin, Resumed):
        label_space = _resumed_label_space(config, origin.folder, train_split)
    else:
        label_space = label_space_for(config, train_split)
    _report_data(config, train_split, eval_splits)
    return TrainingData(train_split, labels, eval_splits, label_space, SkippedImages(train_split), images, reordered)


def evaluated_splits(config: ConfigDict) -> list[str]:
    """Return the names of the splits that a training evaluates: to select weights, to fit thresholds, and the test
    splits.

    A name can occur more than once.
    """
    names = [selection_split(config)]
    if config.thresholds.at_end:
        names.append(split_to_fit(config))
    names += config.data.test_splits
    return [name for name in names if name not in ("", OUT_OF_FOLD)]


def label_space_for(config: ConfigDict, train_split: Split) -> LabelSpace:
    """Compute the label space of a new run from its training split."""
    options = {
        "grouped": prompts_class(config).uses_groups,
        "vectors": head_class(config).needs_vectors,
        "name_vectors": vectors_for(config),
    }
    space = compute_label_space(train_split, original_name(config.data), config.model, config.seed, **options)
    if path := config.data.categories:
        return replace(space, categories=read_categories(resolve_path(config.data, path), space.names))
    return space


def _resumed_label_space(config: ConfigDict, folder: RunFolder, train_split: Split) -> LabelSpace:
    """Read the label space of the run in the folder, or raise UserError if it has other labels than the training split.

    Logs a warning if the training split has changed since the run started.
    """
    space = read_label_space(folder)
    if space.names != tuple(train_split.classes):
        raise UserError(f"{folder} holds a run on other labels than the data has now; train in another --workdir")
    positives = train_split.labels.count(POSITIVE)
    same_number = space.images == len(train_split)  # otherwise a warning of `_report_order` says more
    if same_number and (space.tree != train_split.tree or (space.positives != positives).any()):
        _logger.warning(f"labels have changed since the run in {folder} started, so it continues with other labels")
    return space


def _record_images(
    config: ConfigDict, train_split: Split, eval_splits: dict[str, Split], origin: Origin | None
) -> tuple[ImageRecord, bool]:
    """Return the record of the images of a training, compared with the record of the run that it starts from.

    The second result is `_report_order` for a resumed run; otherwise False. If images that the initial values were
    trained on are to be evaluated, a warning is logged. If a run is resumed that has not evaluated these images before,
    or that is finished and has other images, UserError is raised.
    """
    others = [split for split in eval_splits.values() if split.name != config.data.train_split]
    evaluated = (name for split in others for name in split.ids)
    record = ImageRecord.of(train_split.ids, evaluated, sample_digests((train_split, *others)))
    before = read_image_record(origin.folder) if isinstance(origin, RunOrigin) else None
    if before is None:
        return record, False
    if origin.resumes:
        _require_images_of_end(origin.folder, record, before)
    for split in others:
        if leak := describe_leak(before, origin.folder, split.name, split.ids):
            known = set(before.find_evaluated(split.ids))  # the warning was logged when the run started
            if origin.resumes and not known.issuperset(before.find_trained(split.ids)):
                raise UserError(f"{leak}; move them back, or train in another --workdir")
            _logger.warning(leak)
    reordered = origin.resumes and _report_order(config, origin.folder, train_split, record, before)
    return record.after(before), reordered


def _require_images_of_end(folder: RunFolder, now: ImageRecord, before: ImageRecord) -> None:
    """Raise UserError if a training has ended on other images than those of `now`; `before` is its record."""
    if training_finished(folder) and not now.has_images_of(before):
        raise UserError(
            f"{folder} holds a finished training on other images, which were in "
            f"{find_root(read_config(folder).data) or 'another place'}; train in another --workdir"
        )


def _report_order(
    config: ConfigDict, folder: RunFolder, train_split: Split, now: ImageRecord, before: ImageRecord
) -> bool:
    """Return whether the training images of a resumed run, or their order, have changed since `before`, and log
    warnings.

    Raises UserError if they have changed and the loss has values per training image.
    """
    if moved := before.find_evaluated(train_split.ids):
        _logger.warning(
            f"the training split now has {quantity(len(moved), 'image')} that the run in {folder} evaluated, so its "
            f"earlier results are on other images: {abbreviate(moved)}"
        )
    if np.array_equal(before.trained, now.trained):
        if not now.has_images_of(before):
            _logger.warning(f"images have changed since the run in {folder} started, so it continues with other images")
        return False
    changed = (
        f"the training images of the run in {folder}, or their order, have changed since it started "
        f"({len(before.trained):,} then, {len(now.trained):,} now)"
    )
    if LOSSES[config.loss.kind].keeps_values:
        raise UserError(f"{changed}, and loss.kind={config.loss.kind} has values for each; train in another --workdir")
    _logger.warning(f"{changed}, so it continues with another order of images")
    return True


def _report_data(config: ConfigDict, train_split: Split, eval_splits: dict[str, Split]) -> None:
    """Log warnings about the config and the splits, and print the numbers of training images and labels."""
    head = head_class(config)
    if head.unknown_labels and train_split.labels.count(UNKNOWN).any():
        _logger.warning(f"{config.model.head.kind} {head.unknown_labels}")
    others = list(eval_splits.values())
    name = original_name(config.data)
    is_own = name in DATA_SETS and DATA_SETS[name].reads_classes  # published splits stay, to compare with papers
    twins = shared_twins(train_split, others, config.data) if is_own else []
    for warning in [*configuration.find_warnings(config), *check_splits(train_split, others), *twins]:
        _logger.warning(warning)
    root = find_root(config.data)
    place = f" in {root}" if root else ""
    images, labels = quantity(len(train_split), "training image"), quantity(len(train_split.classes), "label")
    status(f"{config.data.name}{place}: {images}, {labels}")


def with_features(data: TrainingData, extractor: FeatureExtractor) -> TrainingData:
    """Return a copy of `data` with cached backbone features instead of images; missing features are computed first.

    Raises UserError if there is not enough disk space.
    """
    train_split = extractor.cached(data.train_split)
    eval_splits = {name: extractor.cached(split) for name, split in data.eval_splits.items()}
    return replace(data, train_split=train_split, eval_splits=eval_splits)
