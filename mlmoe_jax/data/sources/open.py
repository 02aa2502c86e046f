"""Open splits of any data set by its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import UNKNOWN, present_codes
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.sources.catalog import DATA_SETS
from mlmoe_jax.data.sources.named_files import read_label_tree, resolve_path
from mlmoe_jax.data.sources.source import difficult_treatment, require_known_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import unused_input
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.text import abbreviate, quantity


def open_split(
    data_config: ConfigDict,
    split: str,
    *,
    classes: Sequence[str] | None = None,
    tree: LabelTree | None = None,
    seed: int = 0,
    keep_missing: bool = False,
) -> Split:
    """Open a split of the data set `data.name`.

    The steps are, in this order: apply `data.corrections` to the training split, make labels consistent with
    `data.tree`, hold out images, and leave out images without a file. Images without a file are left out only with
    data.bad_images=skip. This is the last step, so that the held-out images do not depend on missing files.

    Args:
      classes: the ordered class names of the training split, or None. A source without fixed classes uses them to read
        its labels. For other sources, they must be equal to the classes of the source.
      tree: the label tree; None reads `data.tree`.
      seed: the seed with which images are held out if `data.split_seed` is −1. A fraction `data.val_fraction` of the
        training split is held out as the split `data.val_split`.
      keep_missing: whether images without a file stay in the split.

    Raises:
      UserError: there is no such data set, the classes differ, the source cannot be read, or an image has no file
        although data.bad_images is error.
    """
    holds_out = data_config.val_fraction and split in (data_config.train_split, data_config.val_split)
    opened = _open_source(data_config, data_config.train_split if holds_out else split, classes)
    if tree is None:
        tree = read_label_tree(data_config, opened.classes)
    if data_config.corrections and opened.name == data_config.train_split:
        from mlmoe_jax.data.sources.corrections import correct_labels  # here, because the config imports this module

        opened = correct_labels(opened, resolve_path(data_config, data_config.corrections), tree.attributes)
    opened = _note_unknown(opened.close_labels(tree))
    skips = data_config.bad_images == "skip"
    if not skips and len(missing := opened.images.missing()):
        raise UserError(
            f"{len(missing):,} of the {len(opened):,} images of {opened.name} have no file, the first is "
            f"{opened.images.name(missing[0])}; unpack the images there, or leave such images out with "
            "data.bad_images=skip"
        )
    if holds_out:
        opened = _hold_out(opened, split, data_config, seed)
    return opened.without_missing() if skips and not keep_missing else opened


def _note_unknown(split: Split) -> Split:
    """Return the split with a note about the images whose value of an attribute is unknown."""
    unknown = split.labels.count(UNKNOWN)
    counts = {item.name: int(unknown[item.labels[0]]) for item in split.tree.attributes}
    notes = [f"has {quantity(n, 'image')} of {split.name} whose {name} is unknown" for name, n in counts.items() if n]
    if not (notes and split.usage):
        return split
    first, *others = split.usage
    return replace(split, usage=(replace(first, notes=[*first.notes, *notes]), *others))


def _open_source(data_config: ConfigDict, split: str, classes: Sequence[str] | None) -> Split:
    """Open a split without corrections, tree and held-out images.

    Raises UserError if its classes differ from `classes`, or if it has no groups although `data.group_column` is set.
    """
    name, source = data_config.name, DATA_SETS[data_config.name]
    if source.splits:
        require_known_split(name, split, source.splits)
    opened = source.open(data_config, split, *((classes,) if source.reads_classes else ()))
    if source.drops_empty and not data_config.keep_empty:
        opened = _drop_empty(opened, data_config)
    if classes is not None and tuple(classes) != opened.classes:
        raise UserError(
            f"split {split} of {name} has the labels {abbreviate(opened.classes, 4)}, but the model was trained on "
            f"{abbreviate(classes, 4)}"
        )
    if data_config.group_column and opened.groups is None:
        raise UserError(
            f"data.group_column={data_config.group_column} is a column of tables (csv, jsonl), and the data set "
            f"{name} has no groups; clear it, or for packed data pack the table again with this key"
        )
    return opened


def _drop_empty(split: Split, data_config: ConfigDict) -> Split:
    """Return the split without the images that have no positive label; UserError if no image has a positive label."""
    present = split.labels.marked(*present_codes(difficult_treatment(data_config, split.name)))
    positive = present.sum(axis=1) > 0
    if not positive.any():
        raise UserError(
            f"no image of split {split.name} of {data_config.name} has a positive label; check its files or set "
            "data.keep_empty"
        )
    if positive.all():
        return split
    empty = [split.ids[row] for row in np.flatnonzero(~positive)]
    kept = split.take(np.flatnonzero(positive), split.name)
    return kept.leave_out("without a positive label, which data.keep_empty would keep", empty)


def open_splits(
    data_config: ConfigDict, names: Iterable[str], *, seed: int = 0, keep_missing: bool = False
) -> dict[str, Split]:
    """Return the training split, and other splits with its classes, by name. Repeated and empty names are ignored."""
    options = {"seed": seed, "keep_missing": keep_missing}
    train = open_split(data_config, data_config.train_split, **options)
    splits = {data_config.train_split: train}
    for name in filter(None, names):
        if name not in splits:
            splits[name] = open_split(data_config, name, classes=train.classes, tree=train.tree, **options)
    return splits


def original_name(data_config: ConfigDict) -> str:
    """Return `data.name`, or for a packed data set the name of the data set that was packed."""
    original = DATA_SETS[data_config.name].original
    return original(data_config) if original else data_config.name


def count_labels(data_config: ConfigDict) -> int:
    """Return the number of labels of the data set. The training split is opened only if the number is not fixed."""
    name = original_name(data_config)  # may be unknown, because packed data does not need its original source
    labels = DATA_SETS[name].labels if name in DATA_SETS else None
    return labels or len(open_split(data_config, data_config.train_split).classes)


def _hold_out(whole: Split, split: str, data_config: ConfigDict, seed: int) -> Split:
    """Return one part of the training split as the split `split`; UserError if no image remains for training.

    The part `data.val_split` has about the fraction `data.val_fraction` of the images, see `draw_held_out`. Any other
    name means the remaining images. With `data.join_twins`, images that are nearly equal are in one part.
    """
    from mlmoe_jax.data.sampling import draw_held_out  # here, because the config imports this module
    from mlmoe_jax.data.twins import join_twins

    fraction = data_config.val_fraction
    whole = join_twins(whole, data_config)
    held_out = draw_held_out(whole.units, fraction, seed if data_config.split_seed < 0 else data_config.split_seed)
    if held_out.all():
        groups = "" if whole.groups is None else f" in {quantity(len(set(whole.units)), 'group')}"
        problem = (
            f"data.val_fraction={fraction} of {quantity(len(whole), 'training image')}{groups} leaves none for "
            "training; lower it, or add images"
        )
        raise UserError("; ".join([problem, *unused_input(whole.usage)]))
    part = whole.take(np.flatnonzero(held_out == (split == data_config.val_split)), name=split)
    count = int(held_out.sum())
    usage = tuple(account.hold_out(whole.name, data_config.val_split, count) for account in whole.usage)
    return replace(part, usage=usage)
