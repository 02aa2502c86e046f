"""From the rows of a source to a split, with one check for all sources."""

from __future__ import annotations

import difflib
import itertools
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.attributes import NO_ATTRIBUTES, AttributeValues
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import NEGATIVE, UNKNOWN
from mlmoe_jax.data.names import find_split, is_no_value, label_problem, require_names, split_key
from mlmoe_jax.data.sources.named_files import attributes_of
from mlmoe_jax.data.sources.source import used_splits
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import LeftOut, Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, find_file
from mlmoe_jax.runtime.text import abbreviate, compose, quantity

if TYPE_CHECKING:
    from mlmoe_jax.data.label_matrix import LabelMatrix

SPLIT_COLUMN = "split"  # the column or key that names the split of an image
SHOWN_SPLITS = 8  # names of splits that are not used, which the account counts one by one


class ImageRow(NamedTuple):
    """The labels of one image, as a source lists them. The rows of an image are merged.

    Attributes:
      image: path of the image.
      labels: label -> code; None if nobody has labeled the image.
      other_labels: the code of all labels that are not in `labels`, NEGATIVE or UNKNOWN.
      split: name of the split of the image; None or blank if the source does not assign the image to a split.
      group: name of the group of the image, such as a patient; "" if the image is a group of its own.
      line: line number of the image in a table; 0 if the file does not have one line per image.
      is_complete: whether no other row of the image can add a label, because the row has a value for each label.
    """

    image: str
    labels: Mapping[str, int] | None
    other_labels: int = NEGATIVE
    split: str | None = None
    group: str = ""
    line: int = 0
    is_complete: bool = False

    @property
    def position(self) -> str:
        """The line or the image, for the account of a file."""
        return f"line {self.line}" if self.line else self.image

    def merge(self, other: ImageRow) -> ImageRow:
        """Return this row with the labels of another row; ValueError if they differ in a known label or the group."""
        if self.group and other.group and self.group != other.group:
            raise ValueError(f"group: '{self.group}' and '{other.group}'")
        if bool(self.labels) != bool(other.labels) and not self.is_complete and self.other_labels == NEGATIVE:
            raise ValueError("labels: some and none")
        unstated = self.other_labels if self.is_complete else UNKNOWN
        labels = {
            label: _known_code(label, self.labels.get(label, unstated), other.labels.get(label, unstated))
            for label in {**self.labels, **other.labels}
        }
        others = max(self.other_labels, other.other_labels)  # NEGATIVE if one row says so, otherwise UNKNOWN
        return self._replace(labels=labels, other_labels=others, group=self.group or other.group)


def _known_code(label: str, first: int, second: int) -> int:
    """Return the code of a label in two rows of an image; ValueError if both are known and differ."""
    if first != second and UNKNOWN not in (first, second):
        raise ValueError(f"label '{label}': {first} and {second}")
    return second if first == UNKNOWN else first


@dataclass(frozen=True)
class Listing:
    """A file or folder that lists images with their labels, and the name of the split to open.

    Attributes:
      folder: the folder of the images, to which their paths are relative.
      classes: the known classes, in order; None if the file should list them.
      config: `config.data`; None for the files of a published data set.
      has_splits: whether the file may name the split of each row. Otherwise, all rows belong to the split to open, even
        if they name another split.
    """

    path: PathLike
    split: str
    folder: PathLike
    classes: Sequence[str] | None = None
    config: ConfigDict | None = None
    has_splits: bool = False

    @cached_property
    def usage(self) -> Usage:
        """The account of the file, to which its reader and `select_split` add."""
        return Usage(f"{self.path}", "image")

    @cached_property
    def attributes(self) -> AttributeValues:
        """The attributes, whose values are classes too."""
        return attributes_of(self.config).known_by(self.classes) if self.config else NO_ATTRIBUTES

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The names of all splits that are used."""
        return used_splits(self.config, self.split) if self.has_splits else (self.split,)

    def line(self, number: int) -> str:
        """Return the path of the file and a line number, for errors. 0 stands for no line and is left out."""
        return f"{self.path} line {number}" if number else f"{self.path}"

    @cached_property
    def _start(self) -> str:
        return os.path.abspath(self.folder).rstrip("/") + "/"

    def image_path(self, image: str) -> str:
        """Return the path of an image, relative if it is below `folder`, without ./, dir/../ and repeated slashes."""
        if "\\" in image or "./" in image or "//" in image:
            image = os.path.normpath(image.replace("\\", "/"))
        return image.removeprefix(self._start)

    def find_image(self, image: str) -> str:
        """Return a path of `image_path` without the last names of `folder` before it, if only that file exists.

        Predictions have the paths of --images, such as ../photos/1.jpg for 1.jpg in the folder photos.
        """
        names, folders = list(itertools.dropwhile("..".__eq__, image.split("/"))), self._start.split("/")[:-1]
        ends = (count for count in range(len(names)) if names[:count] == folders[len(folders) - count :])
        paths = [image, *("/".join(names[count:]) for count in ends)]
        if paths[-1] == image:
            return image
        return next((path for path in paths if os.path.lexists(find_file(os.path.join(self.folder, path)))), image)


LabelRows = tuple[Iterable[ImageRow], Sequence[str] | None]  # of a file, and the classes if the file lists them
ReadRows = Callable[[Listing], LabelRows]


def select_split(rows: Iterable[ImageRow], listing: Listing, own_classes: Sequence[str] | None = None) -> Split:
    """Check the rows of all splits, and return one split, in the order of the rows. Ids are the paths of the images.

    Its classes are the first of these that exists: `listing.classes`; `own_classes`, which the file lists; and the
    labels of all rows, sorted by name.

    Raises:
      UserError: no row belongs to the split, the rows of an image contradict each other, a label is not a name or not
        one of the classes, no image has a group in `data.group_column`, or a path is absolute.
    """
    selection = _Selection(listing, listing.classes or own_classes)
    for row in rows:
        selection.add(row)
    return selection.result()


@dataclass
class _Part:
    """The rows with one spelling of a split. `split` is None if no split uses them. `position` is the first row."""

    split: str | None
    position: str
    count: int = 0


class _Selection:
    """The rows of the split to open, collected as arrays, and the account of all rows.

    Attributes:
      parts: split, as rows spell it -> the `_Part` of the rows with this spelling.
      unlabeled: the number of images of the split to open that nobody has labeled.
      labels: the label of each column. The classes are first, then other labels in the order of the rows.
      column_of_label: label -> its column.
      columns: label, as rows spell it -> its column.
      has_spellings: whether a row spells a label differently from its name in `labels`.
      first_unknown: the first label that is not one of the classes, and its row.
      rows: path of an image in composed Unicode -> its row in the arrays. Rows of the arrays that are not in `rows`
        were merged into later rows.
    """

    def __init__(self, listing: Listing, classes: Sequence[str] | None):
        self.listing, self.usage, self.attributes = listing, listing.usage, listing.attributes
        self.classes = None if classes is None else tuple(self._spell(name, listing.path) for name in classes)
        require_names(self.classes or (), listing.path)
        self.parts: dict[str | None, _Part] = {}
        self.unlabeled = 0
        self.labels = list(dict.fromkeys((*(self.classes or ()), *self.attributes.labels)))
        self.column_of_label = {name: k for k, name in enumerate(self.labels)}
        self.columns: dict[str, int] = {}
        self.has_spellings = False
        self.first_unknown: tuple[ImageRow, str] | None = None
        self._clear()

    def _clear(self) -> None:
        self.rows: dict[str, int] = {}
        self.merged, self.shortened = LeftOut(), LeftOut()
        self.images: list[str] = []
        self.groups: list[str] = []
        self.lines, self.other_labels = array("q"), array("b")
        self.label_ends, self.label_columns, self.label_codes = array("q"), array("i"), array("b")

    def add(self, row: ImageRow) -> None:
        """Add a row to the account and, if it belongs to the split to open, to the images."""
        part = self.parts.get(row.split) or self._add_part(row)
        included = part.split == self.listing.split
        if row.labels is None and part.split is not None:
            self.unlabeled += included
            self.usage.leave_out("without labels", row.position)
            return
        part.count += 1
        if part.split is None:
            return
        if included or self.classes is None:
            for name in row.labels:
                if name not in self.columns:
                    self._add_label(name, row)
        if included:
            self._add_image(row)

    # ------------------------------------------------------------------------------------------------------- splits
    def _add_part(self, row: ImageRow) -> _Part:
        """Add and return the part of a row whose split is spelled as in no earlier row."""
        listing, name = self.listing, row.split
        if not isinstance(name, str | None):
            raise UserError(f"{listing.line(row.line)} has the split {name!r}, which is not text; enclose it in quotes")
        earlier_are_blank = all(map(_is_blank, self.parts))
        if not listing.has_splits:
            split = listing.split
        elif _is_blank(name):
            split = listing.config.train_split if earlier_are_blank else None
        else:
            split = find_split(name, listing.splits)
            if earlier_are_blank:
                self._clear()
                for part in self.parts.values():
                    part.split = None
        self.parts[name] = _Part(split, row.position)
        return self.parts[name]

    def _count_splits(self) -> None:
        """Add the rows that belong to a split, and those that belong to none, to the account."""
        listing, usage, contrary = self.listing, self.usage, LeftOut()
        for name, part in self.parts.items():
            split, position, count = part.split, part.position, part.count
            if split is not None:
                usage.use(split, count)
                if not (listing.has_splits or _is_blank(name) or split_key(name) == split_key(split)):
                    contrary.add(f"{position}: '{name}'", count)
            elif _is_blank(name):
                usage.leave_out("without a split", position, count)
            elif len(usage.left_out) < SHOWN_SPLITS:
                usage.leave_out(why_unused(name, listing.splits), position, count)
            else:
                usage.leave_out("of other splits", f"'{name}'", count)
        if contrary.count:
            usage.notes.append(
                f"is the file of split {listing.split} (data.table), so another split in "
                f"{quantity(contrary.count, 'row')}{contrary} is ignored"
            )

    # ------------------------------------------------------------------------------------------------------- labels
    def _add_label(self, name: object, row: ImageRow) -> None:
        """Find or add the column of a label that is spelled as in no earlier row; UserError if it is not a name."""
        label = self._spell(name, self.listing.line(row.line)) if isinstance(name, str) else ""
        if label not in self.column_of_label:
            if problem := label_problem(label):
                image = "" if row.line else f" of {row.image}"
                raise UserError(f"{self.listing.line(row.line)} has the label {name!r:.100}{image}, {problem}")
            if not self.attributes.owns(label):
                self.first_unknown = self.first_unknown or (row, label)
            self.column_of_label[label] = len(self.column_of_label)
            self.labels.append(label)
        self.has_spellings |= name != label
        self.columns[name] = self.column_of_label[label]

    def _spell(self, name: str, place: PathLike) -> str:
        """Return the label that a row spells `name`; UserError if it is no value of its attribute."""
        try:
            return self.attributes.spell(compose(name).strip())
        except ValueError as error:
            raise UserError(f"{place} has the label {name!r:.100}, {error}") from error

    # ------------------------------------------------------------------------------------------------------- images
    def _add_image(self, row: ImageRow) -> None:
        image = row.image
        if not image:
            raise UserError(f"{self.listing.line(row.line)} has no image path")
        if not isinstance(image, str):
            raise UserError(f"{self.listing.line(row.line)} has the image {image!r:.100}, which is not a path")
        path = self.listing.image_path(image)
        image = self.listing.find_image(path)
        if image != path:
            self.shortened.add(path)
        key = compose(image)
        columns = self.columns
        if self.has_spellings or key in self.rows:
            row, columns = self._merge(row, self.rows.get(key)), self.column_of_label
        self.rows[key] = len(self.images)
        self.images.append(image)
        self.groups.append(compose(row.group))
        self.lines.append(row.line)
        self.other_labels.append(row.other_labels)
        self.label_columns.extend(map(columns.__getitem__, row.labels))
        self.label_codes.extend(row.labels.values())
        self.label_ends.append(len(self.label_columns))

    def _merge(self, row: ImageRow, at: int | None) -> ImageRow:
        """Return a row with names of labels instead of spellings, merged with row `at` of the arrays unless it is None.

        Raises UserError if two values of a label or of the group differ.
        """
        labels: dict[str, int] = {}
        line = row.line if at is None else self.lines[at]
        try:
            for name, code in row.labels.items():
                label = self.labels[self.columns[name]]
                labels[label] = _known_code(label, labels.get(label, UNKNOWN), code)
            row = row._replace(labels=labels)
            if at is not None:
                self.merged.add(row.position)
                row = self._stored(at, row.is_complete).merge(row)
        except ValueError as error:
            where = (
                f"lists {row.image}" if line == row.line else f"lists {row.image} in the lines {line} and {row.line}"
            )
            raise UserError(
                f"{self.listing.path} {where} with two values of its {error}; correct one of them"
            ) from error
        return row

    def _stored(self, at: int, is_complete: bool) -> ImageRow:
        """Return row `at` of the arrays. `is_complete` is equal for all rows of a file."""
        part = slice(self.label_ends[at - 1] if at else 0, self.label_ends[at])
        names = map(self.labels.__getitem__, self.label_columns[part])
        labels = dict(zip(names, self.label_codes[part], strict=True))
        values = (self.other_labels[at], None, self.groups[at], self.lines[at], is_complete)
        return ImageRow(self.images[at], labels, *values)

    def _note_changed(self) -> None:
        usage = self.usage
        if count := self.shortened.count:
            place = f"{quantity(count, 'image')} with the path of {self.listing.folder}"
            usage.notes.append(f"names {place} before them, which is left out{self.shortened}")
        if merged := self.merged.count:
            usage.merge(self.listing.split, merged)
            usage.notes.append(f"lists images again in {quantity(merged, 'row')}{self.merged}, which are merged")
        spellings = Counter(self.columns.values())
        if several := [name for name, column in self.column_of_label.items() if spellings[column] > 1]:
            usage.notes.append(f"has labels in several spellings, which are merged: {abbreviate(several)}")

    # ------------------------------------------------------------------------------------------------------- result
    def result(self) -> Split:
        """Return the split; UserError if there are no images, or if a label is not one of the classes."""
        self.parts = {name: part for name, part in self.parts.items() if part.count}  # of unlabeled rows alone, 0
        listing, path = self.listing, self.listing.path
        if not self.images:
            raise UserError("; ".join([f"{path} {self._why_empty()}", *self.usage.sentences()]))
        if self.classes is not None and self.first_unknown:
            raise UserError(self._why_unknown(*self.first_unknown))
        if not self.column_of_label:
            raise UserError(
                f"{path} contains no labels, so the classes are unknown; correct data.label_column, or set "
                "data.classes to a file that lists the classes"
            )
        self._count_splits()
        self._note_changed()
        classes = tuple(sorted(self.labels) if self.classes is None else self.labels)
        files = ImageFiles(listing.folder, self.images, os.path.basename(path), self.lines if any(self.lines) else ())
        groups = self.groups if any(self.groups) else None
        split = Split(listing.split, classes, self._labels(classes), self.images, files, groups, usage=(self.usage,))
        if len(self.rows) < len(self.images):
            split = split.take(np.array(list(self.rows.values())), split.name)
        if listing.config:
            _require_groups_and_paths(split, listing)
        return split

    def _labels(self, classes: Sequence[str]) -> LabelMatrix:
        from mlmoe_jax.data.label_matrix import LabelMatrix, csr_array  # here, for the same reason as in `split`

        position = {name: k for k, name in enumerate(classes)}
        order = np.array([position[name] for name in self.column_of_label], np.int32)
        entries = np.asarray(self.label_codes), order[np.asarray(self.label_columns)]
        stated = csr_array((*entries, np.append(0, self.label_ends)), (len(self.images), len(classes)))
        return LabelMatrix(stated, np.asarray(self.other_labels))

    def _why_unknown(self, row: ImageRow, name: str) -> str:
        close = difflib.get_close_matches(name, self.classes, n=1)
        hint = f"did you mean '{close[0]}'" if close else "correct it, or list all classes in data.classes"
        count = len(self.classes)
        place = f"{self.listing.line(row.line)} has the label '{name}'{'' if row.line else f' of {row.image}'}"
        return f"{place}, which is not one of the {count} classes; {hint}"

    def _why_empty(self) -> str:
        split = self.listing.split
        if self.unlabeled:
            return f"has no labeled image ({quantity(self.unlabeled, 'image')} without labels); label some first"
        if not self.parts:
            return "lists no images"
        if all(map(_is_blank, self.parts)):
            train = self.listing.config.train_split
            return (
                f"has no splits, so all its images are in split {train} and none in {split}; write one table per split "
                "and use {split} in data.table, or hold out images with data.val_fraction and clear data.test_splits"
            )
        named = sorted(name for name in self.parts if not _is_blank(name))
        return (
            f"lists no images of split {split}; its splits are {abbreviate(named)}; rename them, or set "
            "data.train_split, data.val_split and data.test_splits"
        )


def _require_groups_and_paths(split: Split, listing: Listing) -> None:
    """Raise UserError if no image has a group in `data.group_column`, a group is no name, or a path is absolute."""
    path, group_column = listing.path, listing.config.group_column
    if group_column and split.groups is None:
        raise UserError(
            f"{path} has no group in the column '{group_column}' for any image of split {split.name}; fill it, or "
            "correct or clear data.group_column"
        )
    if wrong := next(filter(is_no_value, split.groups or ()), ""):
        raise UserError(
            f"{path} has the group '{wrong}', which stands for no value; leave it empty where an image is a group of "
            "its own"
        )
    if outside := next((image for image in split.ids if image.startswith("/")), ""):
        raise UserError(
            f"{path} lists {outside:.200}, which is not below {split.images.folder}; set data.images to a folder above "
            "all images, such as /"
        )


def _is_blank(name: str | None) -> bool:
    return not (name and name.strip())


def why_unused(name: str, splits: Sequence[str]) -> str:
    """Return the reason, for an account, why images of the split `name` are left out. `splits` are used."""
    return f"of split '{name}', while the config uses {', '.join(splits)}"


def note_empty(rows: Iterable[ImageRow], usage: Usage) -> None:
    """Note the images without a label in the account of a file, which may be images that nobody has labeled yet."""
    if empty := [row.image for row in rows if not row.labels]:
        count = quantity(len(empty), "image")
        usage.notes.append(f"has {count} without an annotation, whose labels are all negative: {abbreviate(empty, 3)}")
