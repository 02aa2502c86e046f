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

import itertools
import os
import urllib.parse
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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

_ROWS_AT_ONCE = 4096
_NULL = "__HIVE_DEFAULT_PARTITION__"
LONGEST_PATH = 4096  # characters; a longer text is an image as text, such as base64


class Container(NamedTuple):
    """A format of files with images and labels.

    Attributes:
      kind: the noun for files of this format.
      unit: the noun for what is counted in a file.
      find: (place, account) -> the files of this format, and the split that the path of each names.
      read_schema: (path of a file, listing) -> the columns of the file, and which has the images or their paths, "" if
        none has; None if the file has no images.
      read_cells: (path, listing, columns) -> the name of each row in the file, and its cells by column.
      open_images: (folder, files, title, column of images) -> the images of all rows, in order.
    """

    kind: str
    unit: str
    find: Callable[..., dict[str, str | None]]
    read_schema: Callable[..., tuple[pa.Schema, str] | None]
    read_cells: Callable[..., Iterable[tuple[int | str, Mapping[str, Any]]]]
    open_images: Callable[..., Any]


def open_container_split(
    container: Container, data_config: ConfigDict, split: str, classes: Sequence[str] | None = None
) -> Split:
    """Open a split of images in files of a container, in the order of their paths and rows.

    Ids are FILE#ROW, or paths if the images are files. The classes are the first of these that exists: the file
    `data.classes`, `classes`, the classes that the files name, all labels in the files, sorted by name. Raises
    UserError as `select_split`, and if a file is damaged or has no such column.
    """
    place = open_place(data_config.root)
    if data_config.classes:
        classes = _read_classes(place, data_config.classes)
    listing = Listing(place.folder, split, place.fetch([]), classes, data_config, has_splits=True)
    listing.usage.unit = container.unit
    files = _choose_files(container, place, listing)
    place.fetch(list(files))
    plans = _plan_files(container, files, place, listing)
    if not plans:
        raise UserError(f"{place.folder} has no images of split {split}; set data.root to a folder with some")
    rows = (row for plan in plans for row in _read_rows(container, plan))
    opened = select_split(rows, listing, classes or _own_classes(plans))
    if plans[0].files:
        place.fetch(sorted({*opened.ids} & {*place.names}))
        return opened
    images = container.open_images(listing.folder, list(files), place.folder, data_config.image_column)
    return replace(opened, images=images.take(images.find_rows(opened.ids)))


def _choose_files(container: Container, place: Place, listing: Listing) -> dict[str, str | None]:
    """Return the files of the used splits, and the split that each names; UserError if the split to open has none."""
    found = container.find(place, listing.usage)
    if not found:
        raise UserError(f"{place.folder} has no {container.kind}{place.hint}; set data.root to a folder with some")
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


# ------------------------------------------------------------------------------------------------------------- columns
class _Plan(NamedTuple):
    """What to read from a file.

    Attributes:
      name: path of the file below the folder of images. `path` is the whole path.
      split: the split that the path names; None if it names none.
      columns: all columns of the file.
      image: the column of images, or of their paths.
      files: all files below the folder of images if `image` has paths; otherwise none.
      marks: the columns of the split, unless the path names it, of the group and of attributes.
      label: the column of labels; "" if there is one per class.
      classes: the classes that the file names, or for numbers those in `data.classes`; None if there are none.
      names_classes: whether the file names them.
    """

    name: str
    path: str
    split: str | None
    given: Listing
    columns: Sequence[str]
    image: str
    files: Collection[str]
    marks: Marks
    label: str
    classes: Sequence[str] | None
    names_classes: bool

    @property
    def label_columns(self) -> Sequence[str]:
        return [self.label] if self.label else self.classes


def _plan_files(container: Container, files: Mapping[str, str | None], place: Place, given: Listing) -> list[_Plan]:
    """Return what to read from each file that has images, and note the columns that are not used."""
    known = frozenset(place.names)
    found = (_plan_file(container, name, known, split, given) for name, split in files.items())
    plans = list(filter(None, found))
    _note_columns(plans, given.usage)
    return plans


def _plan_file(
    container: Container, name: str, files: Collection[str], split: str | None, given: Listing
) -> _Plan | None:
    """Return what to read from a file; UserError if it is damaged, or it is not clear which columns to read."""
    path = f"{given.folder}/{name}"
    read = container.read_schema(path, given)
    if read is None:
        return None
    schema, image = read
    marks = find_marks(schema.names, given, path)
    if split:
        marks = marks._replace(split=None)
    paths = files if image in find_columns(schema, TEXT) else frozenset()
    labels = _find_labels(schema, (image, *marks.columns), path, given)
    return _Plan(name, path, split, given, schema.names, image, paths, marks, *labels)


def _find_labels(
    schema: pa.Schema, others: Sequence[str | None], path: str, given: Listing
) -> tuple[str, Sequence[str] | None, bool]:
    """Return `label`, `classes` and `names_classes` of a plan."""
    config = given.config
    if config.label_column == LABEL_COLUMN:
        label = find_label_column(schema, others, path)
    else:
        label = config.label_column and find_column(schema.names, config.label_column, "data.label_column", path)
    stated = config.classes and given.classes
    if label:
        noted = class_names(read_features(schema).get(label))
        return label, noted or stated or None, bool(noted)
    booleans = [] if stated else find_columns(schema, BOOLEAN, others)
    return "", class_columns(booleans or find_columns(schema, NUMBER, others), path, given), True


def _own_classes(plans: Sequence[_Plan]) -> Sequence[str] | None:
    """Return the classes that the files name; UserError if two files differ."""
    first, *others = plans
    for plan in others:
        if (plan.classes, bool(plan.files)) != (first.classes, bool(first.files)):
            raise UserError(
                f"{plan.path} has other classes or another kind of images than {first.path}; set data.root "
                "to files of one kind"
            )
    return first.classes


def _note_columns(plans: Sequence[_Plan], usage: Usage) -> None:
    """Note which columns are used although no key names them, and which are not used."""
    columns = {column: None for plan in plans for column in plan.columns}
    used = {name for plan in plans for name in (*plan.label_columns, plan.image, *plan.marks.columns)}
    note_unused(usage, "column", columns, used)
    if any(plan.split and find_name(plan.columns, SPLIT_COLUMN) for plan in plans):
        usage.notes.append(f"has a column '{SPLIT_COLUMN}', which is ignored, because the paths of files name splits")
    labels, stated = (plans[0].label_columns, plans[0].given.config.label_column) if plans else ([], "")
    if stated and not find_name(labels, stated):
        usage.notes.append(f"has its labels in {abbreviate(labels)}; data.label_column names another column")


# ---------------------------------------------------------------------------------------------------------------- rows
def _read_rows(container: Container, plan: _Plan) -> Iterator[ImageRow]:
    """Yield the rows of a file; UserError if cells do not have the form of labels."""
    paths = [plan.image] if plan.files else []
    columns = list(filter(None, (*plan.label_columns, *plan.marks.columns, *paths)))
    for name, cells in container.read_cells(plan.path, plan.given, columns):
        try:
            row = _make_row(plan, name, cells)
        except Exception as error:  # cells of another form raise errors of many types
            shown = ", ".join(f"{cells[column]}" for column in plan.label_columns)
            why = f"{'the value ' if isinstance(error, KeyError) else ''}{error}"
            raise UserError(
                f"{plan.path}#{name}, with the labels {shown:.80}, cannot be read: {why}; docs/datasets.md "
                "lists the forms of labels"
            ) from error
        yield row


def _make_row(plan: _Plan, name: int | str, cells: Mapping[str, Any]) -> ImageRow:
    """Return row `name` of a file."""
    image = f"{plan.name}#{name}"
    if plan.files:
        if not cells[plan.image]:
            raise ValueError("it has no path of an image")
        if len(cells[plan.image]) > LONGEST_PATH:
            raise ValueError(f"its path has {len(cells[plan.image]):,} characters; store images as bytes")
        image = cells[plan.image]
        beside = os.path.join(os.path.dirname(plan.name), image)
        if beside in plan.files or image not in plan.files:  # paths may also be relative to the folder of all files
            image = beside
    if plan.label:
        labels = _read_labels(plain_value(cells[plan.label]), plan)
    else:
        labels = {column: plain_value(cells[column]) for column in plan.classes}
    if labels is None:
        return ImageRow(image, None, split=plan.split or plain_value(cells.get(plan.marks.split)))
    row = make_row(image, labels, cells, plan.marks, plan.given)
    return row._replace(split=plan.split or row.split)


def _read_labels(cell: Any, plan: _Plan) -> Any:
    """Return names of labels, or codes by name, for a cell; None for no label."""
    if isinstance(cell, str):
        return [name for name in map(str.strip, read_cell_names(cell, plan.given.config.separator)) if name]
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
    return _name_numbers(values, plan.classes, may_be_codes=isinstance(cell, list) and not plan.names_classes)


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


# ------------------------------------------------------------------------------------------------------------- Parquet
def _read_schema(path: str, given: Listing) -> tuple[pa.Schema, str] | None:
    import pyarrow as pa  # here, because --help does without it

    with open_file(path) as file:
        if not file.metadata.num_rows:  # its columns may have no types
            return None
        schema = file.schema_arrow
    for name in _partitions(path, given):
        schema = schema if name in schema.names else schema.append(pa.field(name, pa.string()))
    return schema, find_image_column(schema, given.config.image_column, path)


def _read_cells(path: str, given: Listing, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_file(path) as file, damage_explained(path):
        stored = [name for name in columns if name in file.schema_arrow.names]
        partitions = {name: cell for name, cell in _partitions(path, given).items() if name not in stored}
        batches = file.iter_batches(_ROWS_AT_ONCE, columns=stored)
        for row, cells in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches)):
            yield row, cells | partitions


def _partitions(path: str, given: Listing) -> dict[str, str | None]:
    """Return column -> cell of all rows in a file in folders such as label=cat, as Spark and Hive write columns."""
    folders = path.removeprefix(f"{given.folder}/").split("/")[:-1]
    pairs = (folder.split("=", 1) for folder in folders if "=" in folder and not folder.startswith(PARTITION))
    return {name: None if cell == _NULL else urllib.parse.unquote(cell) for name, cell in pairs}


_CONTAINER = Container(
    kind="Parquet files",
    unit="row",
    find=lambda place, usage: find_splits(place, ".parquet"),
    read_schema=_read_schema,
    read_cells=_read_cells,
    open_images=open_parquet,
)
PARQUET = DataSource(partial(open_container_split, _CONTAINER), reads_classes=True)
