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
def places(images: Iterable[tuple[Split, int]]) -> str:
    """Return the places of images, (split, row), such as "labels.csv lines 2, 7": lines of tables, or else ids."""
    lines: dict[str, list[int]] = defaultdict(list)
    ids = []
    for split, row in images:
        if (at := split.images.line(row)) is None:
            ids.append(split.ids[row])
        else:
            lines[at[0]].append(at[1])
    parts = [f"{table} line{'s' if len(at) > 1 else ''} {examples(sorted(at))}" for table, at in lines.items()]
    return " and ".join([*parts, *([examples(ids)] if ids else [])])


# -------------------------------------------------------------------------------------------------------------- labels
class Labels:
    """The labels of all splits of a data set, with the images that have them."""

    def __init__(self, splits: Sequence[Split]):
        self.splits, self.names = splits, splits[0].classes
        self.counts = np.sum([_present(split).sum(axis=0) for split in splits], axis=0).tolist()
        self.images = sum(map(len, splits))

    def describe(self, k: int, *, lines: bool = True) -> str:
        """Return label `k` with its number of images and, with `lines`, their places."""
        column = slice(k, k + 1) if lines else slice(0)
        images = [
            (split, int(row)) for split in self.splits for row in np.flatnonzero(_present(split, column).any(axis=1))
        ]
        where = f": {places(images)}" if images else ""
        return f"'{self.names[k]}' ({quantity(self.counts[k], 'image')}{where})"

    def several(self, labels: Sequence[int]) -> str:
        """Return the first of `labels`, as in `describe`."""
        return examples(map(self.describe, labels))


def _present(split: Split, columns: slice = slice(None)) -> np.ndarray:
    return np.isin(split.labels[:, columns], (POSITIVE, DIFFICULT))


def doubtful_labels(splits: Sequence[Split], separator: str) -> list[str]:
    """Return a sentence about each label of the splits that is probably a mistake, at most one per label.

    `separator` is `data.separator` if a cell of the table has several names, else "".
    """
    labels = Labels(splits)
    reported: set[int] = set()
    sentences = []
    for doubts in (_variants(labels), _joined(labels, separator), _misspelt(labels), _constant(labels)):
        for about, sentence in doubts:
            if reported.isdisjoint(about):
                reported |= about
                sentences.append(sentence)
    if single := [k for k, count in enumerate(labels.counts) if count == 1 and k not in reported]:
        many = (
            f"{quantity(len(single), 'label')} with one image, too few to train and evaluate: {labels.several(single)}"
        )
        sentences.append(f"{many}; add images, or remove the label")
    return sentences


def _variants(labels: Labels) -> Iterator[tuple[set[int], str]]:
    """Yield labels that differ from a more frequent label only in case, spaces, hyphens or underscores."""
    groups = defaultdict(list)
    for k, name in enumerate(labels.names):
        plain = unicodedata.normalize("NFKC", name).strip().casefold()
        groups[re.sub(r"[\s_-]+", " ", plain)].append(k)
    for group in groups.values():
        main, *others = sorted(group, key=lambda k: -labels.counts[k])
        for k in others:
            yield (
                {k},
                f"label {labels.describe(k)} differs from {labels.describe(main, lines=False)} only in case, spaces, "
                f"hyphens or underscores; write '{labels.names[main]}' there if they are the same",
            )


def _joined(labels: Labels, separator: str) -> Iterator[tuple[set[int], str]]:
    """Yield names that consist of other names, separated by a character that is not `separator`."""
    known = set(labels.names)
    for mark in SEPARATORS if separator else ():
        parts = {k: [part.strip() for part in name.split(mark)] for k, name in enumerate(labels.names) if mark in name}
        counts = Counter(part for several in parts.values() for part in set(several))
        joined = [
            k for k, several in parts.items() if all(part and (part in known or counts[part] > 1) for part in several)
        ]
        if joined:
            yield (
                set(joined),
                f"{quantity(len(joined), 'label')} made of several names separated by {mark!r} instead of "
                f"{separator!r}: {labels.several(joined)}; write {separator!r} there, or set data.separator if all of "
                f"the table has {mark!r}",
            )


def _misspelt(labels: Labels) -> Iterator[tuple[set[int], str]]:
    """Yield rare labels that are one typing error from a frequent label."""
    frequent = defaultdict(set)
    for k, name in enumerate(labels.names):
        if labels.counts[k] >= FREQUENT:
            for key in _shortened(name):
                frequent[key].add(k)
    for k, name in enumerate(labels.names):
        if 0 < labels.counts[k] <= RARE:
            near = {other for key in _shortened(name) for other in frequent[key]}
            right = [other for other in near if _is_typing_error(name.casefold(), labels.names[other].casefold())]
            if right:
                main = max(right, key=lambda other: labels.counts[other])
                yield (
                    {k},
                    f"label {labels.describe(k)} may be a misspelling of {labels.describe(main, lines=False)}; write "
                    f"'{labels.names[main]}' there if it is",
                )


def _shortened(name: str) -> set[str]:
    """Return a name, and the name without each letter; names that are one error apart have a common element."""
    lower = name.casefold()
    return {lower, *(lower[:at] + lower[at + 1 :] for at in range(len(lower)))}


def _is_typing_error(wrong: str, right: str) -> bool:
    """Return whether two names differ in one typing error. Short names may be two words, such as cat and car.

    An error is a swap of two letters; a letter that is added or left out, in names of at least four letters; or another
    letter in place of any except the first, in names of at least six letters. Different digits are no error.
    """
    if re.findall(r"\d", wrong) != re.findall(r"\d", right):
        return False
    start = _common(wrong, right)
    end = _common(wrong[start:][::-1], right[start:][::-1])
    ours, theirs = wrong[start : len(wrong) - end], right[start : len(right) - end]
    if len(ours) == len(theirs) == 2:
        return ours == theirs[::-1]
    if len(ours) + len(theirs) == 1:
        return max(len(wrong), len(right)) >= 4
    return len(ours) == len(theirs) == 1 and start > 0 and len(right) >= 6


def _common(first: str, second: str) -> int:
    """Return the number of letters with which both texts begin."""
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


def _constant(labels: Labels) -> Iterator[tuple[set[int], str]]:
    """Yield labels of all images."""
    for k, name in enumerate(labels.names):
        if labels.counts[k] == labels.images > 1:
            yield (
                {k},
                f"label '{name}' is on all {labels.images:,} images, so a model learns nothing from it; remove it",
            )


# --------------------------------------------------------------------------------------------------------------- files
def why_missing(paths: Sequence[str], root: str) -> str:
    """Return the correction for image files that do not exist, by files below `root` with similar names."""
    if windows := [path for path in paths if "\\" in path]:
        return f"{len(windows):,} of the paths have \\, as on Windows: write / instead"
    present: dict[str, str] = {}
    files = (
        (place, name)
        for place, _, names in os.walk(os.path.expanduser(root), followlinks=True)
        for name in sorted(names)
    )
    for place, name in itertools.islice(files, MOST_FILES):
        for key in (name.casefold(), os.path.splitext(name.casefold())[0]):
            present.setdefault(key, os.path.join(place, name))
    hints: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        name = os.path.basename(path).casefold()
        if match := present.get(name):
            same = os.path.normpath(os.path.dirname(match)) == os.path.normpath(os.path.dirname(path))
            fix = "the case of letters counts" if same else "correct data.images or the paths in the table"
            hints[fix].append(f"{path}, but there is {match}")
        elif match := present.get(os.path.splitext(name)[0]):
            hints["correct the suffixes in the table"].append(f"{path}, but there is {match}")
    if not hints:
        return f"put {paths[0]} there, or correct data.root, data.images or the paths in the table"
    fix, examples = max(hints.items(), key=lambda item: len(item[1]))
    return f"the table has {examples[0]} ({len(examples):,} such): {fix}"
