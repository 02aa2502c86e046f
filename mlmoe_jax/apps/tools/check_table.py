"""Mistakes of a table that no reader refuses: misspelled labels and useless labels.

Each mistake is a sentence with the lines of the table, the number of images and the correction. Labels may differ on
purpose, so sentences about labels are warnings.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.text import abbreviate, quantity

# A label on at most RARE images may be the misspelling of a label on at least FREQUENT images.
RARE, FREQUENT = 2, 10
SEPARATORS = (",", ";", "|", "/")

Mistakes = Iterator[tuple[set[int], str]]  # labels, and a sentence about them


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
    parts = [
        f"{table} line{'s' if len(rows) > 1 else ''} {abbreviate(list(map(str, sorted(rows))))}"
        for table, rows in lines.items()
    ]
    if ids:
        parts.append(abbreviate(ids))
    return " and ".join(parts)


# -------------------------------------------------------------------------------------------------------------- labels
class LabelCounts:
    """The labels of all splits of a data set, with the images that have them."""

    def __init__(self, splits: Sequence[Split]):
        self.splits, self.names = splits, splits[0].classes
        self.counts = np.sum([_is_label(split.labels).sum(axis=0) for split in splits], axis=0).tolist()
        self.images = sum(map(len, splits))

    def describe(self, k: int) -> str:
        """Return label `k` with its number of images and the places of the images."""
        images = ((split, row) for split in self.splits for row in np.flatnonzero(_is_label(split.labels[:, k])))
        return f"'{self.names[k]}' ({quantity(self.counts[k], 'image')}: {image_places(images)})"

    def describe_several(self, labels: Sequence[int]) -> str:
        """Return the first of `labels`, as in `describe`."""
        return abbreviate([self.describe(k) for k in labels])


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
    for mistaken, sentence in itertools.chain(*mistakes):
        if reported.isdisjoint(mistaken):
            reported |= mistaken
            sentences.append(sentence)
    if single := [k for k, count in enumerate(labels.counts) if count == 1 and k not in reported]:
        sentences.append(
            f"{quantity(len(single), 'label')} with one image, too few to train and evaluate: "
            f"{labels.describe_several(single)}; add images, or remove the label"
        )
    return sentences


def _variants(labels: LabelCounts) -> Mistakes:
    """Yield each label that differs from a more frequent one only in case, spaces, hyphens or underscores."""
    groups = defaultdict(list)
    for k, name in enumerate(labels.names):
        if labels.counts[k]:
            plain = unicodedata.normalize("NFKC", name).strip().casefold()
            groups[re.sub(r"[\s_-]+", " ", plain)].append(k)
    for group in groups.values():
        main, *others = sorted(group, key=lambda k: -labels.counts[k])
        for k in others:
            yield (
                {k},
                f"label {labels.describe(k)} differs from '{labels.names[main]}' only in case, spaces, hyphens or "
                f"underscores; write '{labels.names[main]}' there if they are the same",
            )


def _joined_names(labels: LabelCounts, separator: str) -> Mistakes:
    """Yield the labels that are several names with a character other than `separator` between them."""
    for mark in SEPARATORS if separator else ():
        if joined := _names_joined_by(mark, labels.names):
            yield (
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


def _misspellings(labels: LabelCounts) -> Mistakes:
    """Yield each rare label that is one typing error from a frequent label."""
    by_count = sorted(zip(labels.counts, labels.names, strict=True), reverse=True)
    frequent = [name for count, name in by_count if count >= FREQUENT]
    for k in (k for k, count in enumerate(labels.counts) if 0 < count <= RARE):
        similar = (name for name in frequent if _is_typing_error(labels.names[k].casefold(), name.casefold()))
        if main := next(similar, ""):
            yield {k}, f"label {labels.describe(k)} may be a misspelling of '{main}'; write '{main}' there if it is"


def _is_typing_error(wrong: str, right: str) -> bool:
    """Return whether two names differ in one typing error. Short names may be two words, such as cat and car.

    An error is a swap of two letters; a letter that is added or left out, in names of at least four letters; or another
    letter in place of any except the first, in names of at least six letters. Different digits are no error.
    """
    if re.findall(r"\d", wrong) != re.findall(r"\d", right):
        return False
    start = next(
        (at for at, (a, b) in enumerate(zip(wrong, right, strict=False)) if a != b), min(len(wrong), len(right))
    )
    wrong_end, right_end = wrong[start:], right[start:]
    if wrong_end[1:] == right_end or wrong_end == right_end[1:]:
        return max(len(wrong), len(right)) >= 4
    if wrong_end[1:] == right_end[1:]:
        return start > 0 and len(right) >= 6
    return wrong_end[:2] == right_end[:2][::-1] and wrong_end[2:] == right_end[2:]


def _constant_labels(labels: LabelCounts) -> Mistakes:
    """Yield each label that all images have."""
    for k, name in enumerate(labels.names):
        if labels.counts[k] == labels.images > 1:
            yield (
                {k},
                f"label '{name}' is on all {labels.images:,} images, so a model learns nothing from it; remove it",
            )
