"""Images and labels in Parquet files, as the hub, Spark and pandas store them: a row per image.

`data.root` is a folder of files, one file, or an address, see `containers.reach`. `containers.files_of_splits` says
which file belongs to which split. If no file names a split, a column `split` does, or all rows are the training split.

`data.image_column` has bytes, or paths relative to the folder of the file. `data.label_column` has one of

    a list of names, or a text with `data.separator` between names
    numbers of classes, one or a list, named in the file (ClassLabel of the datasets library) or in `data.classes`
    a list of 0 and 1 for the lines of `data.classes`
    a struct with 1, 0 or null for each class

If it is empty, there is a column per class with 1, 0 or null for unknown. A null in `data.label_column` means that
nobody has labeled the image. If a file has no column with the default of one of these keys, the only column that can be
meant is taken. Only the columns that are needed are read, and the images not before they are used.
"""

from __future__ import annotations

import abc
import itertools
import os
import urllib.parse
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlmoe_jax.data.containers.columns import (
    BOOLEAN,
    LABEL_COLUMN,
    NUMBER,
    TEXT,
    class_names,
    find_columns,
    find_image_column,
    find_label_column,
    read_features,
)
from mlmoe_jax.data.containers.files_of_splits import PARTITION, find_splits
from mlmoe_jax.data.containers.parquet_images import open_file, open_parquet
from mlmoe_jax.data.containers.reach import Place, open_place
from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.data.names import find_name, find_split
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, ImageRow, Listing, select_split, why_unused
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.data.sources.tables import (
    Marks,
    class_columns,
    find_column,
    find_marks,
    make_row,
    note_unused,
    plain_value,
)
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import read_cell_names
from mlmoe_jax.runtime.text import abbreviate, quantity

if TYPE_CHECKING:
    import pyarrow as pa

    from mlmoe_jax.data.containers.stored import StoredImages

_ROWS_AT_ONCE = 4096
_NULL = "__HIVE_DEFAULT_PARTITION__"
LONGEST_PATH = 4096  # characters; a longer text is an image as text, such as base64


class LabeledFile(abc.ABC):
    """A file with images and labels, of which some columns are read. A subclass is a format of such files.

    Attributes:
      kind: the noun for files of this format.
      unit: the noun for what is counted in a file.
      name: path of the file below the folder of images. `path` is the whole path.
      split: the split that the path names; None if it names none.
      schema: all columns of the file; None if it has no images.
      image: the column of images, or of their paths; "" if there is none.
      files: all files below the folder of images if `image` has paths; otherwise none.
    """

    kind: str
    unit: str

    def __init__(self, name: str, split: str | None, given: Listing, files: Collection[str]):
        self.name, self.split, self.given, self.path = name, split, given, f"{given.folder}/{name}"
        self.schema, self.image = self.read_schema()
        self.files = files if self.image and self.image in find_columns(self.schema, TEXT) else frozenset()

    @staticmethod
    @abc.abstractmethod
    def find(place: Place, usage: Usage) -> dict[str, str | None]:
        """Return the files of this format, and the split that the path of each names."""

    @staticmethod
    @abc.abstractmethod
    def open_images(folder: str, names: Sequence[str], title: str, column: str) -> StoredImages:
        """Return the images of all rows of files, in order. `column` is `data.image_column`."""

    @abc.abstractmethod
    def read_schema(self) -> tuple[pa.Schema | None, str]:
        """Return `schema` and `image`."""

    @abc.abstractmethod
    def read_cells(self, columns: Sequence[str]) -> Iterator[tuple[int | str, Mapping[str, Any]]]:
        """Yield the name of each row in the file, and its cells by column."""

    # ----------------------------------------------------------------------------------------------------- columns
    @cached_property
    def marks(self) -> Marks:
        """The columns of the split, unless the path names it, of the group and of attributes."""
        marks = find_marks(self.schema.names, self.given, self.path)
        return marks._replace(split=None) if self.split else marks

    @cached_property
    def label(self) -> str:
        """The column of labels; "" if there is one per class."""
        name = self.given.config.label_column
        if name == LABEL_COLUMN:
            return find_label_column(self.schema, (self.image, *self.marks.columns), self.path)
        return name and find_column(self.schema.names, name, "data.label_column", self.path)

    @cached_property
    def noted(self) -> Sequence[str] | None:
        """The classes that the file names for the numbers in `label`; None if it names none."""
        return class_names(read_features(self.schema).get(self.label)) or None

    @cached_property
    def classes(self) -> Sequence[str] | None:
        """The classes that the file names, or for numbers those in `data.classes`; None if there are none."""
        stated = self.given.config.classes and self.given.classes
        if self.label:
            return self.noted or stated or None
        others = (self.image, *self.marks.columns)
        booleans = [] if stated else find_columns(self.schema, BOOLEAN, others)
        return class_columns(booleans or find_columns(self.schema, NUMBER, others), self.path, self.given)

    @property
    def label_columns(self) -> Sequence[str]:
        return [self.label] if self.label else self.classes

    # -------------------------------------------------------------------------------------------------------- rows
    def rows(self) -> Iterator[ImageRow]:
        """Yield the rows of the file; UserError if cells do not have the form of labels."""
        paths = [self.image] if self.files else []
        for name, cells in self.read_cells(list(filter(None, (*self.label_columns, *self.marks.columns, *paths)))):
            try:
                row = self._make_row(name, cells)
            except Exception as error:  # cells of another form raise errors of many types
                shown = ", ".join(f"{cells[column]}" for column in self.label_columns)
                why = f"{'the value ' if isinstance(error, KeyError) else ''}{error}"
                raise UserError(
                    f"{self.path}#{name}, with the labels {shown:.80}, cannot be read: {why}; docs/datasets.md "
                    "lists the forms of labels"
                ) from error
            yield row

    def _make_row(self, name: int | str, cells: Mapping[str, Any]) -> ImageRow:
        image = self._find_path(cells[self.image]) if self.files else f"{self.name}#{name}"
        if self.label:
            labels = self._read_labels(plain_value(cells[self.label]))
        else:
            labels = {column: plain_value(cells[column]) for column in self.classes}
        row = make_row(image, labels, cells, self.marks, self.given, labeled=labels is not None)
        return row._replace(split=self.split or row.split)

    def _find_path(self, image: str | None) -> str:
        """Return the path of an image below the folder of images, relative to which it may be, or to this file."""
        if not image:
            raise ValueError("it has no path of an image")
        if len(image) > LONGEST_PATH:
            raise ValueError(f"its path has {len(image):,} characters; store images as bytes")
        beside = os.path.join(os.path.dirname(self.name), image)
        return image if image in self.files and beside not in self.files else beside

    def _read_labels(self, cell: Any) -> Any:
        """Return names of labels, or codes by name, for a cell; None for no label."""
        if isinstance(cell, str):
            return [name for name in map(str.strip, read_cell_names(cell, self.given.config.separator)) if name]
        if isinstance(cell, dict):
            return {name: plain_value(value) for name, value in cell.items()}
        if cell is None or cell == -1:  # -1 is an unknown class of the datasets library
            return None
        values = list(map(plain_value, cell)) if isinstance(cell, list) else [cell]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) == len(values):
            return values
        if texts:
            raise ValueError("the list has names and other values, such as null; remove those")
        return _name_numbers(values, self.classes, may_be_codes=isinstance(cell, list) and not self.noted)


def _name_numbers(values: Sequence[Any], names: Sequence[str] | None, *, may_be_codes: bool) -> Any:
    """Return names of classes for their numbers, or codes by name for a value per class; ValueError for others."""
    if names is None:
        raise ValueError("numbers need the names of their classes, in their order, in data.classes")
    if may_be_codes and len(values) == len(names) < 3:
        raise ValueError("they may be numbers of classes, or a 1 or 0 for each; write names, or a struct")
    if len(values) == len(names) > 2 and {*values} <= {0, 1, None}:  # more than two numbers from two would repeat one
        return dict(zip(names, values, strict=True))
    if len({*values}) < len(values) or not all(type(value) is int and 0 <= value < len(names) for value in values):
        raise ValueError(f"they are not different numbers from 0 to {len(names) - 1}")
    return [names[value] for value in values]


# --------------------------------------------------------------------------------------------------------------- split
def open_labeled_files(
    kind: type[LabeledFile], data_config: ConfigDict, split: str, classes: Sequence[str] | None = None
) -> Split:
    """Open a split of images in files of a format, in the order of their paths and rows.

    Ids are FILE#ROW, or paths if the images are files. The classes are the first of these that exists: the file
    `data.classes`, `classes`, the classes that the files name, all labels in the files, sorted by name. Raises
    UserError as `select_split`, and if a file is damaged or has no such column.
    """
    place = open_place(data_config.root)
    if data_config.classes:
        classes = _read_classes(place, data_config.classes)
    listing = Listing(place.folder, split, place.fetch([]), classes, data_config, has_splits=True)
    listing.usage.unit = kind.unit
    names = _choose_files(kind, place, listing)
    place.fetch(list(names))
    known = frozenset(place.names)
    found = (kind(name, own, listing, known) for name, own in names.items())
    files = [file for file in found if file.schema is not None]
    if not files:
        raise UserError(f"{place.folder} has no images of split {split}; set data.root to a folder with some")
    _note_columns(files, listing)
    rows = itertools.chain.from_iterable(file.rows() for file in files)
    opened = select_split(rows, listing, classes or _own_classes(files))
    if files[0].files:
        place.fetch(sorted({*opened.ids} & {*place.names}))
        return opened
    images = kind.open_images(listing.folder, list(names), place.folder, data_config.image_column)
    return replace(opened, images=images.take(images.find_rows(opened.ids)))


def _choose_files(kind: type[LabeledFile], place: Place, listing: Listing) -> dict[str, str | None]:
    """Return the files of the used splits, and the split that each names; UserError if the split to open has none."""
    found = kind.find(place, listing.usage)
    if not found:
        raise UserError(f"{place.folder} has no {kind.kind}{place.hint}; set data.root to a folder with some")
    if not any(found.values()):
        return found
    used = {name: split for name, split in found.items() if split and find_split(split, listing.splits)}
    for split, count in Counter(split for name, split in found.items() if name not in used).items():
        why = why_unused(split, listing.splits) if split else "without a split in their names"
        listing.usage.notes.append(f"has {quantity(count, 'file')} {why}")
    if listing.split not in (find_split(name, listing.splits) for name in used.values()):
        names = abbreviate(sorted(filter(None, {*found.values()})))
        raise UserError(
            f"{place.folder} has no files of split {listing.split}; its splits are {names}; set data.train_split, "
            "data.val_split and data.test_splits, or hold out images with data.val_fraction"
        )
    return used


def _read_classes(place: Place, name: str) -> Sequence[str]:
    name = os.path.expanduser(name)
    return read_classes(name if os.path.isabs(name) else os.path.join(place.fetch([name]), name))


def _own_classes(files: Sequence[LabeledFile]) -> Sequence[str] | None:
    """Return the classes that the files name; UserError if two files differ."""
    first, *others = files
    for file in others:
        if (file.classes, bool(file.files)) != (first.classes, bool(first.files)):
            raise UserError(
                f"{file.path} has other classes or another kind of images than {first.path}; set data.root "
                "to files of one kind"
            )
    return first.classes


def _note_columns(files: Sequence[LabeledFile], given: Listing) -> None:
    """Note which columns are used although no key names them, and which are not used."""
    columns = {column: None for file in files for column in file.schema.names}
    used = {name for file in files for name in (*file.label_columns, file.image, *file.marks.columns)}
    notes, labels, stated = given.usage.notes, files[0].label_columns, given.config.label_column
    note_unused(given.usage, "column", columns, used)
    if any(file.split and find_name(file.schema.names, SPLIT_COLUMN) for file in files):
        notes.append(f"has a column '{SPLIT_COLUMN}', which is ignored, because the paths of files name splits")
    if stated and not find_name(labels, stated):
        notes.append(f"has its labels in {abbreviate(labels)}; data.label_column names another column")


# ------------------------------------------------------------------------------------------------------------- Parquet
class ParquetFile(LabeledFile):
    """A Parquet file with a row per image."""

    kind, unit = "Parquet files", "row"
    open_images = staticmethod(open_parquet)

    @staticmethod
    def find(place: Place, usage: Usage) -> dict[str, str | None]:
        return find_splits(place, ".parquet")

    def read_schema(self) -> tuple[pa.Schema | None, str]:
        import pyarrow as pa  # here, because --help does without it

        with open_file(self.path) as file:
            if not file.metadata.num_rows:  # its columns may have no types
                return None, ""
            schema = file.schema_arrow
        for name in self._partitions():
            schema = schema if name in schema.names else schema.append(pa.field(name, pa.string()))
        return schema, find_image_column(schema, self.given.config.image_column, self.path)

    def read_cells(self, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        with open_file(self.path) as file, damage_explained(self.path):
            stored = [name for name in columns if name in file.schema_arrow.names]
            partitions = {name: cell for name, cell in self._partitions().items() if name not in stored}
            batches = file.iter_batches(_ROWS_AT_ONCE, columns=stored)
            for row, cells in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches)):
                yield row, cells | partitions

    def _partitions(self) -> dict[str, str | None]:
        """Return column -> cell of all rows in a file in folders such as label=cat, as Spark and Hive write columns."""
        folders = self.name.split("/")[:-1]
        pairs = (folder.split("=", 1) for folder in folders if "=" in folder and not folder.startswith(PARTITION))
        return {name: None if cell == _NULL else urllib.parse.unquote(cell) for name, cell in pairs}


PARQUET = DataSource(partial(open_labeled_files, ParquetFile), reads_classes=True)
