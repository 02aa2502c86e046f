"""Find probable mistakes in the labels of a data set, such as misspelled labels and labels that all images have.

A table with such labels can be read without an error. Each mistake is reported as a sentence with the lines of the
table, the number of images and the correction. The sentences are warnings, because the labels may be intended.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from scipy.sparse import csc_array

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.names import SEPARATORS, find_variants, names_joined_by
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.text import abbreviate, quantity

# A label on at most RARE images may be the misspelling of a label on at least FREQUENT images.
RARE, FREQUENT = 2, 10
REGULAR = 0.75  # share of equal steps in the numbers of a sequence
_CONTAINER = re.compile(r".*\.(tar|parquet)#")  # before the name of an image in it

Mistakes = Iterator[tuple[set[int], str]]  # pairs of the indices of labels, and a sentence about these labels


# -------------------------------------------------------------------------------------------------------------- places
def image_places(images: Iterable[tuple[Split, int]]) -> str:
    """Return text such as "labels.csv lines 2, 7". An image that is not listed in a table is named by its id."""
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


def name_sequences(splits: Sequence[Split]) -> list[str]:
    """Return a sentence if names that differ only in the last number look like frames of several sequences.

    The numbers of a sequence have a regular step. Sequences that are named after a label or a split are none, nor those
    of a data set with groups. [] if less than half of the images are in sequences, or more than half in one.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    names = [name for split in splits if split.groups is None for name in split.ids]
    for name in names:
        member = _CONTAINER.sub("", name)  # files of a container are no sequences
        if found := re.fullmatch(r"(.*?\D)(\d+)(\.\w+)?", member):
            numbers[found[1]].add(int(found[2]))
    others = {_letters(name) for name in (*splits[0].classes, *(split.name for split in splits))}
    sequences = {
        stem: len(members)
        for stem, members in numbers.items()
        if _is_regular(sorted(members)) and others.isdisjoint({_letters(stem), _letters(stem.rpartition("/")[2])})
    }
    images = sum(sequences.values())
    if len(sequences) < 2 or 2 * images < len(names) or 2 * max(sequences.values()) > len(names):
        return []
    return [
        f"{quantity(images, 'image')} in {quantity(len(sequences), 'sequence')} by name "
        f"({abbreviate([f'{stem}…' for stem in sequences], 3)}); if those of one are alike, such as frames of a clip, "
        "list the sequence in a column, and name it in data.group_column"
    ]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())


def _is_regular(numbers: Sequence[int]) -> bool:
    """Return whether most differences of neighbors are equal."""
    steps = np.diff(numbers)
    return len(steps) > 0 and np.unique(steps, return_counts=True)[1].max() >= REGULAR * len(steps)


# -------------------------------------------------------------------------------------------------------------- labels
class LabelCounts:
    """The labels of a data set, and the number of images with each label in all splits together.

    A label counts as present if its code is positive or difficult. `images` is the number of all images.
    """

    def __init__(self, splits: Sequence[Split]):
        self.splits, self.names = splits, splits[0].classes
        self._marks = [csc_array(split.labels.marked(POSITIVE, DIFFICULT)) for split in splits]
        self.counts = np.sum([marks.sum(axis=0) for marks in self._marks], axis=0).tolist()
        self.images = sum(map(len, splits))

    def describe(self, k: int) -> str:
        """Return text with the name of label `k`, its number of images, and the places of these images."""
        images = (
            (split, row)
            for split, marks in zip(self.splits, self._marks, strict=True)
            for row in marks.indices[slice(*marks.indptr[k : k + 2])]
        )
        return f"'{self.names[k]}' ({quantity(self.counts[k], 'image')}: {image_places(images)})"

    def describe_several(self, labels: Sequence[int]) -> str:
        """Return text that describes several labels, given by their indices. A long list is abbreviated."""
        return abbreviate([self.describe(k) for k in labels])


def doubtful_labels(splits: Sequence[Split], separator: str | None) -> list[str]:
    """Return sentences about labels that are probably mistakes. Each label is in at most one sentence.

    `separator` is the value of `data.separator` if a cell of the table lists the names of several labels, "" if each
    image has a list of names, and None if the names are columns or folders.
    """
    labels = LabelCounts(splits)
    reported: set[int] = set()
    sentences = []
    mistakes = (_variants(labels), _joined_names(labels, separator), _misspellings(labels))
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
    """Yield each label that differs from a more frequent label only in case, spaces, hyphens, underscores or .0."""
    for group in find_variants(labels.names):
        main, *others = sorted(group, key=lambda k: -labels.counts[k])
        for k in others:
            if labels.counts[k]:
                yield (
                    {k},
                    f"label {labels.describe(k)} differs from '{labels.names[main]}' only in case, spaces, hyphens, "
                    f"underscores or .0; write '{labels.names[main]}' there if they are the same",
                )


def _joined_names(labels: LabelCounts, separator: str | None) -> Mistakes:
    """Yield the labels that probably consist of several names joined by a character of SEPARATORS."""
    instead = f" instead of {separator!r}" if separator else ""
    remedy = "list each name as a label of its own"
    for mark in () if separator is None else SEPARATORS:
        if separator:
            remedy = f"write {separator!r} there, or set data.separator if all of the table has {mark!r}"
        if joined := names_joined_by(mark, labels.names):
            yield (
                set(joined),
                f"{quantity(len(joined), 'label')} made of several names separated by {mark!r}{instead}: "
                f"{labels.describe_several(joined)}; {remedy}",
            )


def _misspellings(labels: LabelCounts) -> Mistakes:
    """Yield each label on at most RARE images that is one typing error away from a label on FREQUENT or more images."""
    by_count = sorted(zip(labels.counts, labels.names, strict=True), reverse=True)
    frequent = [name for count, name in by_count if count >= FREQUENT]
    for k in (k for k, count in enumerate(labels.counts) if 0 < count <= RARE):
        similar = (name for name in frequent if _is_typing_error(labels.names[k].casefold(), name.casefold()))
        if main := next(similar, ""):
            yield {k}, f"label {labels.describe(k)} may be a misspelling of '{main}'; write '{main}' there if it is"


def _is_typing_error(wrong: str, right: str) -> bool:
    """Return whether two names differ by one typing error.

    * Two adjacent letters are swapped.
    * One letter is added or left out, and the longer name has at least four letters.
    * One letter other than the first is replaced, and the name has at least six letters.
    Shorter names may be two different words, such as cat and car. Names with different digits are different names.
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
