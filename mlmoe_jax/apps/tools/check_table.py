"""Mistakes of a table that no reader refuses: misspelled labels, useless labels, and paths without files.

Each mistake is a sentence with the lines of the table, the number of images and the correction. Labels may differ on
purpose, so sentences about labels are warnings.
"""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import examples
from mlmoe_jax.runtime.text import quantity

# A label on at most RARE images may be the misspelling of a label on at least FREQUENT images.
RARE, FREQUENT = 2, 10
SEPARATORS = (",", ";", "|", "/")
MOST_FILES = 200_000  # files below the root that are searched for missing images


# -------------------------------------------------------------------------------------------------------------- places
def image_places(images: Iterable[tuple[Split, int]]) -> str:
    """Return the places of images, given as (split, row), such as "labels.csv lines 2, 7".

    An image that is not in a table is named by its id.
    """
    lines: dict[str, list[int]] = defaultdict(list)
    ids = []
    for split, row in images:
        if (table_line := split.images.line(row)) is None:
            ids.append(split.ids[row])
        else:
            table, line = table_line
            lines[table].append(line)
    parts = [f"{table} line{'s' if len(rows) > 1 else ''} {examples(sorted(rows))}" for table, rows in lines.items()]
    if ids:
        parts.append(examples(ids))
    return " and ".join(parts)


# -------------------------------------------------------------------------------------------------------------- labels
class LabelCounts:
    """The labels of all splits of a data set, with the images that have them."""

    def __init__(self, splits: Sequence[Split]):
        self.splits, self.names = splits, splits[0].classes
        self.counts = np.sum([_is_label(split.labels).sum(axis=0) for split in splits], axis=0).tolist()
        self.images = sum(map(len, splits))

    def count_text(self, k: int) -> str:
        """Return label `k` with its number of images."""
        return f"'{self.names[k]}' ({quantity(self.counts[k], 'image')})"

    def describe(self, k: int) -> str:
        """Return label `k` with its number of images and the places of the images."""
        if not self.counts[k]:
            return self.count_text(k)
        images = ((split, row) for split in self.splits for row in np.flatnonzero(_is_label(split.labels[:, k])))
        return f"'{self.names[k]}' ({quantity(self.counts[k], 'image')}: {image_places(images)})"

    def describe_several(self, labels: Sequence[int]) -> str:
        """Return the first of `labels`, as in `describe`."""
        return examples(map(self.describe, labels))


def _is_label(codes: np.ndarray) -> np.ndarray:
    return np.isin(codes, (POSITIVE, DIFFICULT))


def doubtful_labels(splits: Sequence[Split], separator: str) -> list[str]:
    """Return a sentence about each label of the splits that is probably a mistake, at most one per label.

    `separator` is `data.separator` if a cell of the table has several names, else "".
    """
    labels = LabelCounts(splits)
    reported: set[int] = set()
    sentences = []
    mistakes = (_variants(labels), _joined_names(labels, separator), _misspellings(labels), _constant_labels(labels))
    for mistake in itertools.chain(*mistakes):
        if reported.isdisjoint(mistake.labels):
            reported |= mistake.labels
            sentences.append(mistake.sentence)
    if single := [k for k, count in enumerate(labels.counts) if count == 1 and k not in reported]:
        sentences.append(
            f"{quantity(len(single), 'label')} with one image, too few to train and evaluate: "
            f"{labels.describe_several(single)}; add images, or remove the label"
        )
    return sentences


class Mistake(NamedTuple):
    """A sentence, and the labels that it is about."""

    labels: set[int]
    sentence: str


def _variants(labels: LabelCounts) -> Iterator[Mistake]:
    """Yield a mistake per label that differs from a more frequent one only in case, spaces, hyphens or underscores."""
    groups = defaultdict(list)
    for k, name in enumerate(labels.names):
        plain = unicodedata.normalize("NFKC", name).strip().casefold()
        groups[re.sub(r"[\s_-]+", " ", plain)].append(k)
    for group in groups.values():
        main, *others = sorted(group, key=lambda k: -labels.counts[k])
        for k in others:
            yield Mistake(
                {k},
                f"label {labels.describe(k)} differs from {labels.count_text(main)} only in case, spaces, hyphens or "
                f"underscores; write '{labels.names[main]}' there if they are the same",
            )


def _joined_names(labels: LabelCounts, separator: str) -> Iterator[Mistake]:
    """Yield a mistake per character other than `separator` that separates several labels in one name."""
    for mark in SEPARATORS if separator else ():
        if joined := _names_joined_by(mark, labels.names):
            yield Mistake(
                set(joined),
                f"{quantity(len(joined), 'label')} made of several names separated by {mark!r} instead of "
                f"{separator!r}: {labels.describe_several(joined)}; write {separator!r} there, or set data.separator "
                f"if all of the table has {mark!r}",
            )


def _names_joined_by(mark: str, names: Sequence[str]) -> list[int]:
    """Return the positions of names that consist of other names, joined by `mark`.

    A part counts as a name if it is in `names`, or if it is a part of two names.
    """
    parts = {k: [part.strip() for part in name.split(mark)] for k, name in enumerate(names) if mark in name}
    counts = Counter(part for name_parts in parts.values() for part in set(name_parts))
    known = {*names, *(part for part, count in counts.items() if count > 1)} - {""}
    return [k for k, name_parts in parts.items() if known.issuperset(name_parts)]


def _misspellings(labels: LabelCounts) -> Iterator[Mistake]:
    """Yield a mistake per rare label that is one typing error from a frequent label."""
    frequent = defaultdict(set)
    for k, name in enumerate(labels.names):
        if labels.counts[k] >= FREQUENT:
            for key in _shortened(name):
                frequent[key].add(k)
    for k, name in enumerate(labels.names):
        if not 0 < labels.counts[k] <= RARE:
            continue
        similar = {other for key in _shortened(name) for other in frequent[key]}
        right = [other for other in similar if _is_typing_error(name.casefold(), labels.names[other].casefold())]
        if right:
            main = max(right, key=lambda other: labels.counts[other])
            yield Mistake(
                {k},
                f"label {labels.describe(k)} may be a misspelling of {labels.count_text(main)}; write "
                f"'{labels.names[main]}' there if it is",
            )


def _shortened(name: str) -> set[str]:
    """Return a name, and the name without each of its letters. Names with one typing error share an element."""
    lower = name.casefold()
    return {lower, *(lower[:at] + lower[at + 1 :] for at in range(len(lower)))}


def _is_typing_error(wrong: str, right: str) -> bool:
    """Return whether two names differ in one typing error. Short names may be two words, such as cat and car.

    An error is a swap of two letters; a letter that is added or left out, in names of at least four letters; or another
    letter in place of any except the first, in names of at least six letters. Different digits are no error.
    """
    if re.findall(r"\d", wrong) != re.findall(r"\d", right):
        return False
    start = _common_length(wrong, right)
    end = _common_length(wrong[start:][::-1], right[start:][::-1])
    wrong_part, right_part = wrong[start : len(wrong) - end], right[start : len(right) - end]
    if len(wrong_part) == len(right_part) == 2:
        return wrong_part == right_part[::-1]
    if len(wrong_part) + len(right_part) == 1:
        return max(len(wrong), len(right)) >= 4
    return len(wrong_part) == len(right_part) == 1 and start > 0 and len(right) >= 6


def _common_length(first: str, second: str) -> int:
    """Return the number of letters with which both texts begin."""
    length = 0
    for letter, other in zip(first, second, strict=False):
        if letter != other:
            break
        length += 1
    return length


def _constant_labels(labels: LabelCounts) -> Iterator[Mistake]:
    """Yield a mistake per label that all images have."""
    for k, name in enumerate(labels.names):
        if labels.counts[k] == labels.images > 1:
            yield Mistake(
                {k},
                f"label '{name}' is on all {labels.images:,} images, so a model learns nothing from it; remove it",
            )


# --------------------------------------------------------------------------------------------------------------- files
def explain_missing(paths: Sequence[str], root: str) -> str:
    """Return how to correct the paths of missing image files, from files below `root` with similar names."""
    if windows := [path for path in paths if "\\" in path]:
        return f"{len(windows):,} of the paths have \\, as on Windows: write / instead"
    files = _files_by_name(root)
    pairs_by_fix: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        name = os.path.basename(path).casefold()
        if match := files.get(name):
            is_same_folder = os.path.normpath(os.path.dirname(match)) == os.path.normpath(os.path.dirname(path))
            fix = "the case of letters counts" if is_same_folder else "correct data.images or the paths in the table"
        elif match := files.get(os.path.splitext(name)[0]):
            fix = "correct the suffixes in the table"
        else:
            continue
        pairs_by_fix[fix].append(f"{path}, but there is {match}")
    if not pairs_by_fix:
        return f"put {paths[0]} there, or correct data.root, data.images or the paths in the table"
    fix, pairs = max(pairs_by_fix.items(), key=lambda item: len(item[1]))
    return f"the table has {pairs[0]} ({len(pairs):,} such): {fix}"


def _files_by_name(root: str) -> dict[str, str]:
    """Return the files below a folder by their names, with and without suffix, in lower case."""
    files: dict[str, str] = {}
    paths = (
        os.path.join(folder, name)
        for folder, _, names in os.walk(os.path.expanduser(root), followlinks=True)
        for name in sorted(names)
    )
    for path in itertools.islice(paths, MOST_FILES):
        name = os.path.basename(path).casefold()
        files.setdefault(name, path)
        files.setdefault(os.path.splitext(name)[0], path)
    return files
