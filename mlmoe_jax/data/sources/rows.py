"""From the rows of a source to the images and labels of a split, with one check for all sources."""

from __future__ import annotations

import difflib
import os
import re
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int8

from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import NEGATIVE
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, open_text
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import compose, quantity

_Name = TypeVar("_Name", bound=Hashable)
SPLIT_COLUMN = "split"  # the column or key that names the split of an image
_SPELLINGS = {
    "train": ("training", "trn", "tr"),
    "val": ("valid", "validation", "dev", "devel", "development"),
    "test": ("testing", "tst"),
}
_KEY_OF_SPELLING = {spelling: key for key, spellings in _SPELLINGS.items() for spelling in spellings}


def split_key(name: str) -> str:
    """Return a key that is equal for all usual spellings of the name of a split.

    Case, spaces, hyphens and underscores do not count, nor does a word such as "set" at the end: "Training set" and
    "train" have the key "train", "valid" and "dev" the key "val".
    """
    plain = re.sub(r"[\s_-]+", "_", compose(name).strip().casefold())
    stem = re.sub(r"_?(set|split|data|images)$", "", plain)
    known = _KEY_OF_SPELLING.get(stem, stem)
    return known if known in _SPELLINGS else plain


class ImageRow(NamedTuple):
    """One image with its labels, as a source lists it.

    Attributes:
      image: path of the image.
      labels: label -> code; None if nobody has labeled the image.
      other_labels: the code of all labels that are not in `labels`.
      split: name of the split of the image; None if the source does not assign the image to a split.
      group: name of the group of the image, such as a patient; "" if the image is a group of its own.
      line: line number of the image in a table; 0 if the file does not have one line per image.
    """

    image: str
    labels: Mapping[str, int] | None
    other_labels: int = NEGATIVE
    split: str | None = None
    group: str = ""
    line: int = 0


@dataclass(frozen=True)
class Listing:
    """A file or folder that lists images, and the name of the split to open.

    Attributes:
      path: the file or folder.
      split: name of the split to open.
      train_split: name of the split to which rows without a split belong. "" means that all rows of the file belong to
        the split to open, even if they name another split.
    """

    path: str | os.PathLike
    split: str
    train_split: str = ""

    def includes(self, split: str | None) -> bool:
        """Return whether a row belongs to the split to open. `split` is the split that the row names, or None."""
        if not self.train_split:
            return True
        return (self.train_split if split is None else split) == self.split

    def line(self, number: int) -> str:
        """Return a description of the file and a line for errors.

        Without line numbers (`number` is 0) it names only the file.
        """
        return f"{self.path} line {number}" if number else f"{self.path}"


@dataclass(frozen=True)
class ListedImages:
    """The N images of a split, with labels of K classes.

    Attributes:
      listing: the file that lists the images.
      classes: names of the classes.
      images: path of each image.
      labels: label codes i8[N,K].
      groups: name of each image's group, or "" for a group of its own. None if no image has a named group.
      lines: line number of each image in the table; empty if the file does not have one line per image.
    """

    listing: Listing
    classes: tuple[str, ...]
    images: list[str]
    labels: Int8[np.ndarray, "n k"]
    groups: list[str] | None
    lines: Sequence[int]

    def to_split(
        self, folder: str | os.PathLike, files: Sequence[str] | None = None, ids: Sequence[str] | None = None
    ) -> Split:
        """Return these images as a split.

        Args:
          folder: folder of the image files.
          files: paths of the image files relative to the folder; None means `images`.
          ids: names of the images in the split; None means `images`.
        """
        table = os.path.basename(self.listing.path)
        images = ImageFiles(folder, self.images if files is None else files, table, self.lines)
        ids = self.images if ids is None else ids
        return Split(self.listing.split, self.classes, self.labels, ids, images, self.groups)


def validated(rows: Iterable[ImageRow], listing: Listing, classes: Sequence[str] | None = None) -> ListedImages:
    """Check the rows of a source, and return the images of one split.

    Args:
      rows: the rows of all splits, in the order of the images.
      listing: the file that lists the images, and the split to open.
      classes: names of the classes, in order. None means the labels of all rows, sorted by name.

    Raises:
      UserError: no row belongs to the split, an image is listed twice, or a label is not one of the classes.
    """
    selection = _Selection(listing, classes)
    for row in rows:
        selection.add(row)
    if selection.unlabeled and selection.images:
        status(f"{quantity(selection.unlabeled, 'image')} of {listing.path} without labels are left out")
    return selection.result()


class _Selection:
    """The rows of the split to open, collected as arrays. It also records why other rows are not used, for errors.

    Attributes:
      columns: label -> its column. The classes are first, then other labels in the order of the rows.
      images: the images of the split, as the keys of a dict.
      splits: names of the splits in all rows.
      unlabeled: the number of images of the split that nobody has labeled. They are left out.
      first_unknown: line and name of the first label that is not one of the classes.
    """

    def __init__(self, listing: Listing, classes: Sequence[str] | None):
        if classes and (repeated := first_repeated(classes)):
            raise UserError(f"{listing.path} names the class '{repeated}' twice")
        self.listing, self.classes = listing, classes
        self.columns = {_text(name): k for k, name in enumerate(classes or ())}
        self.images: dict[str, None] = {}
        self.splits: set[str | None] = set()
        self.unlabeled = 0
        self.first_unknown: tuple[int, str] | None = None
        self.groups: list[str] = []
        self.lines, self.other_labels = array("q"), array("b")
        self.label_counts, self.label_columns, self.label_codes = array("i"), array("i"), array("b")

    def add(self, row: ImageRow) -> None:
        """Add a row of the split to open. If the row is not used, record the reason."""
        self.splits.add(row.split)
        included = self.listing.includes(row.split)
        if row.labels is None:
            self.unlabeled += included
            return
        if included or self.classes is None:
            for name in row.labels:
                if name not in self.columns:
                    self.columns[_text(name)] = len(self.columns)
                    self.first_unknown = self.first_unknown or (row.line, name)
        if not included:
            return
        if not row.image:
            raise UserError(f"{self.listing.line(row.line)} has no image path")
        if row.image in self.images:
            raise UserError(f"{self.listing.line(row.line)} lists {row.image} again; delete one of the two")
        self.images[_text(row.image)] = None
        self.groups.append(row.group)
        self.lines.append(row.line)
        self.other_labels.append(row.other_labels)
        self.label_counts.append(len(row.labels))
        self.label_columns.extend(map(self.columns.__getitem__, row.labels))
        self.label_codes.extend(row.labels.values())

    def result(self) -> ListedImages:
        """Return the images of the split.

        Raises UserError if there are no images, or if a label is not one of the classes.
        """
        path = self.listing.path
        if not self.images:
            raise UserError(f"{path} {self._why_empty()}")
        if None in self.splits and len(self.splits) > 1 and self.listing.train_split:
            raise UserError(f"{path} names the split of some images only; name the splits of all images or of none")
        if self.classes is not None and self.first_unknown:
            line, name = self.first_unknown
            close = difflib.get_close_matches(name, self.classes, n=1)
            hint = f"did you mean '{close[0]}'" if close else "correct it, or list all classes in data.classes"
            count = len(self.classes)
            raise UserError(
                f"{self.listing.line(line)} has the label '{name}', which is not one of the {count} classes; {hint}"
            )
        if not self.columns:
            raise UserError(
                f"{path} contains no labels, so the classes are unknown; correct data.label_column, or set "
                "data.classes to a file that lists the classes"
            )
        classes = tuple(sorted(self.columns) if self.classes is None else self.classes)
        groups = self.groups if any(self.groups) else None
        lines = self.lines if any(self.lines) else ()
        return ListedImages(self.listing, classes, list(self.images), self._labels(classes), groups, lines)

    def _labels(self, classes: Sequence[str]) -> Int8[np.ndarray, "n k"]:
        position = {name: k for k, name in enumerate(classes)}
        order = np.array([position[name] for name in self.columns], np.int64)
        rows = np.repeat(np.arange(len(self.images)), self.label_counts)
        labels = np.empty((len(self.images), len(classes)), np.int8)
        labels[:] = np.asarray(self.other_labels)[:, None]
        labels[rows, order[np.asarray(self.label_columns)]] = np.asarray(self.label_codes)
        return labels

    def _why_empty(self) -> str:
        train, split = self.listing.train_split, self.listing.split
        if self.unlabeled:
            return f"has no labeled image ({quantity(self.unlabeled, 'image')} without labels); label some first"
        if not self.splits:
            return "lists no images"
        if self.splits == {None}:
            return (
                f"has no splits, so all its images are in split {train} and none in {split}; write one table per split "
                "and use {split} in data.table, or hold out images with data.val_fraction and clear data.test_splits"
            )
        return f"lists no images of split {split}; its splits are {', '.join(sorted(map(str, self.splits)))}"


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"the names of images and labels should be text, not {name!r}")
    return name


def first_repeated(names: Iterable[_Name]) -> _Name | None:
    """Return the first name that is equal to an earlier name; None if all names are different."""
    seen: set[_Name] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def read_classes(path: Path) -> tuple[str, ...]:
    """Return the class names of a file with one name per line.

    Raises UserError if the file is missing or empty, or if a name is repeated.
    """
    with damage_explained(path), open_text(path) as file:
        names = [line.strip() for line in file if line.strip()]
    if not names or (repeated := first_repeated(names)):
        wrong = f"names the class '{repeated}' twice" if names else "contains no class names"
        raise UserError(f"{path} {wrong}; write one class name per line")
    return tuple(names)
