"""Checks that run before each training and evaluation: readable images, labels, and disjoint splits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data.decoding import BRIGHTEST, BadImage, Decoding
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.names import doubtful_names, find_variants, is_no_value
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import Usage, unused_input
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.text import abbreviate, compose, quantity

_logger = logging.getLogger(__name__)

SAMPLE = 16  # images per split that are read before a training or an evaluation
_DARK_BITS = 2  # 16-bit grayscale images are dark if they leave as many of their upper bits unused


def require_same_images(name: str, splits: Iterable[Split]) -> None:
    """Raise UserError unless all processes, which must call this, have the same images, labels and groups."""
    facts = {split.name: [len(split), split.fingerprint] for split in splits}
    for other in distributed.gather(facts):
        for split in facts:
            if other[split] != facts[split]:
                raise UserError(
                    f"the processes find different images or labels of split {split} of {name}; give all hosts "
                    "the same files"
                )


def require_readable(splits: Iterable[Split], data_config: ConfigDict) -> None:
    """Raise UserError if most images of a split have no file, or if most images of a sample cannot be read.

    The sample has SAMPLE images that are spread over the split. The error names the first image that fails. A warning
    is logged if the 16-bit grayscale images of the sample are dark.
    """
    decoding = Decoding.from_config(data_config)
    for split in splits:
        missing = len(split.missing or ())
        if missing > len(split):
            where = split.missing.split.images.name(0)
            raise UserError(
                f"{missing:,} of the {missing + len(split):,} images of split {split.name} have no file, the first is "
                f"{where}; correct data.root, data.images or the paths in the table"
            )
        tried, errors = sample_images(split.images, f"split {split.name}", decoding)
        if 2 * len(errors) > tried:
            raise UserError(
                f"{len(errors)} of {tried} images of split {split.name} that were tried cannot be read, the first "
                f"because {errors[0]}"
            )


def sample_images(images: Images, name: str, decoding: Decoding) -> tuple[int, list[str]]:
    """Read at most SAMPLE images of `name`, evenly spaced, and warn if their 16-bit grayscale values use few bits.

    Return the number of images in this sample, and the reasons why some of them cannot be read.
    """
    rows = sample_rows(len(images))
    errors, values = [], []
    for row in rows:
        try:
            image = images.open(row, decoding)
        except BadImage as error:
            errors.append(str(error))
        else:
            values += [image.info[BRIGHTEST]] if isinstance(image, Image.Image) and BRIGHTEST in image.info else []
    warn_dark(values, len(rows), name, decoding)
    return len(rows), errors


def warn_dark(brightest: Sequence[int], images: int, name: str, decoding: Decoding) -> bool:
    """Log a warning if 16-bit grayscale images use few bits, and return whether they do.

    `brightest` has the largest value of each of them. They are among `images` images of `name`.
    """
    if not brightest or max(brightest) >> decoding.gray_bits - _DARK_BITS:
        return False
    _logger.warning(
        f"{len(brightest)} of {images} images of {name} that were tried are 16-bit grayscale, and the brightest "
        f"value is {max(brightest):,} of {2**decoding.gray_bits - 1:,}, so they are nearly black; if that is white, "
        f"set --config.data.gray_bits={max(8, max(brightest).bit_length())}"
    )
    return True


def sample_rows(images: int) -> list[int]:
    """Return at most SAMPLE row numbers of `images` images, evenly spaced."""
    return sorted(set(np.linspace(0, images - 1, SAMPLE).round().astype(int).tolist())) if images else []


def sample_digests(splits: Iterable[Split]) -> list[str]:
    """Return the `Images.digest` of the sampled images of each split, "" for an unreadable image."""
    return [_digest(split.images, row) for split in splits for row in sample_rows(len(split))]


def _digest(images: Images, row: int) -> str:
    try:
        return images.digest(row)
    except BadImage:
        return ""


def check_splits(train: Split, others: Sequence[Split]) -> list[str]:
    """Return warnings about the labels and ids of splits, and about input that they do not use. No image is read.

    Splits of equal names are checked once. Raises UserError if a split has no image with a positive label, or an id or
    a group is in two splits.
    """
    splits = list({split.name: split for split in (train, *others)}.values())
    for split in splits:
        if not split.labels.count(POSITIVE).any():
            raise UserError(
                f"split {split.name} has no image with a positive label, so nothing can be learned from it or measured "
                "on it; correct its labels, name another split, or hold out more with data.val_fraction"
            )
    for first, second in itertools.combinations(splits, 2):
        if shared := set(map(compose, first.ids)).intersection(map(compose, second.ids)):
            raise UserError(
                f"split {second.name} shares {len(shared):,} of its {len(second):,} images with split {first.name}, "
                f"such as {min(shared)}; correct the lists or name other splits"
            )
    if problems := shared_groups(splits):
        raise UserError(problems[0])
    unused = [*unused_input(list_usages(splits)), *doubtful_groups(splits)]
    return [*unused, *doubtful_names(train.classes), *label_warnings(train, splits[1:]), *contradictions(splits)]


def list_usages(splits: Iterable[Split]) -> list[Usage]:
    """Return the accounts of all splits, which also count the images with several frames."""
    return [account for split in splits for account in (*split.usage, *split.frames)]


def warn_unused(splits: Iterable[Split]) -> None:
    """Log a warning about the input of each file or folder that the splits do not use."""
    for sentence in unused_input(list_usages(splits)):
        _logger.warning(sentence)


def shared_groups(splits: Sequence[Split]) -> list[str]:
    """Return one sentence for each pair of splits that have groups in common."""
    sentences = []
    groups = [dict.fromkeys(filter(None, split.groups or ())) for split in splits]
    for (first, first_groups), (second, second_groups) in itertools.combinations(zip(splits, groups, strict=True), 2):
        if shared := [name for name in second_groups if name in first_groups]:
            sentences.append(
                f"split {second.name} shares {len(shared):,} of its {quantity(len(second_groups), 'group')} with split "
                f"{first.name} ({abbreviate(shared)}); move the images of a group into one split, or clear "
                "data.group_column"
            )
    return sentences


def doubtful_groups(splits: Iterable[Split]) -> list[str]:
    """Return a sentence about groups that may be one, such as P1 and p1; [] if there are none."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(split.groups or () for split in splits)))
    variants = [names[k] for group in find_variants(names) for k in group]
    what = "groups that differ only in case, spaces, hyphens or underscores, and may be one"
    return [f"{what}: {abbreviate(variants)}"] if variants else []


def label_warnings(train: Split, others: Iterable[Split] = ()) -> list[str]:
    """Return sentences about labels whose names stand for no value, and labels with no or only positive images.

    A label without a positive image in `others`, the splits that are evaluated, cannot be measured.
    """
    counts = count_codes(train, POSITIVE)
    empty = list(filter(is_no_value, train.classes))
    sentences = [f"labels whose names stand for no value: {abbreviate(empty)}; are they labels?"] if empty else []
    for what, constant in (("no positive image", 0), ("only positive images", max(2, len(train)))):
        if names := [name for name, count in zip(train.classes, counts, strict=True) if count == constant]:
            sentences.append(
                f"split {train.name} has {what} of {len(names):,} of its {len(train.classes):,} classes, which "
                f"cannot be learned: {abbreviate(names)}"
            )
    for split in others:
        pairs = zip(split.classes, counts, count_codes(split, POSITIVE), strict=True)
        if names := [name for name, trained, count in pairs if trained and not count]:
            sentences.append(
                f"split {split.name} has no positive image of {len(names):,} of its {len(split.classes):,} classes, "
                f"which cannot be measured on it: {abbreviate(names)}"
            )
    return sentences


def contradictions(splits: Iterable[Split]) -> list[str]:
    """Return one sentence per split and kind of contradiction between its labels and the label tree `data.tree`."""
    kinds = (
        "a negative label that another label of the image implies, which counts as positive",
        "exclusive labels that are both positive, which count as unknown",
    )
    sentences = []
    for split in splits:
        for kind, rows in zip(kinds, () if split.contradictions is None else split.contradictions.T, strict=False):
            if rows.any():
                names = abbreviate([split.ids[row] for row in np.flatnonzero(rows)])
                share = f"{rows.sum():,} of the {len(split):,} images of split {split.name}"
                sentences.append(f"{share} have {kind} (data.tree): {names}")
    return sentences


def count_codes(split: Split, value: int) -> list[int]:
    """Return the number of images with the label code `value` per class."""
    return split.labels.count(value).tolist()
