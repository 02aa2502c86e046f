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

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from mlmoe_jax.data.containers.columns import (
    BOOLEAN,
    NUMBER,
    TEXT,
    class_names,
    find_columns,
    find_image_column,
    find_label_column,
    read_features,
)
from mlmoe_jax.data.containers.files_of_splits import find_splits
from mlmoe_jax.data.containers.parquet import open_file, open_parquet
from mlmoe_jax.data.containers.reach import Place, open_place
from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.data.names import find_name
from mlmoe_jax.data.sources.catalog import IMAGE_COLUMN, LABEL_COLUMN
from mlmoe_jax.data.sources.own_images import require_groups_and_paths
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, ImageRow, LabelInput, Listing, select_split, why_unused
from mlmoe_jax.data.sources.source import DataSource, used_splits
from mlmoe_jax.data.sources.tables import class_columns, find_column, make_row, note_unused
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import read_cell_names
from mlmoe_jax.runtime.text import abbreviate, quantity

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".parquet"
ROWS_AT_ONCE = 4096


class Container(NamedTuple):
    """A format of files with images and labels.

    Attributes:
      kind: the noun for files of this format.
      unit: the noun for what is counted in a file.
      find: (place, account) -> the files of this format, and the split that the path of each names.
      plan: (path of a file, its split, input) -> what to read from it, None if it has no images. The input has the full
        path of the file.
      read_rows: yields the rows of a planned file.
      open_images: (folder, files, account, column of images, title) -> the images of all rows, in order.
    """

    kind: str
    unit: str
    find: Callable[[Place, Usage], dict[str, str | None]]
    plan: Callable[[str, str | None, LabelInput], Plan | None]
    read_rows: Callable[[Plan], Iterator[ImageRow]]
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
    splits = used_splits(data_config, split)
    listing = Listing(place.folder, split, place.folder, data_config.train_split, splits)
    usage = Usage(place.folder, container.unit)
    files = _choose_files(place, container.find(place, usage), container.kind, listing, usage)
    folder = place.fetch(list(files))
    if data_config.classes:
        classes = _read_classes(place, data_config.classes)
    given = LabelInput(folder, data_config, folder, classes, usage)
    found = (container.plan(name, part, given._replace(path=f"{folder}/{name}")) for name, part in files.items())
    plans = list(filter(None, found))
    if not plans:
        raise UserError(f"{place.folder} has no images of split {split}; set data.root to a folder with some")
    _note_columns(plans, usage)
    rows = (row for plan in plans for row in container.read_rows(plan))
    opened = select_split(rows, replace(listing, folder=folder), classes or _own_classes(plans), usage)
    require_groups_and_paths(opened, place.folder, data_config.group_column)
    if plans[0].holds_paths:
        place.fetch(sorted({*opened.ids} & {*place.names}))
        return opened
    ignored = Usage(folder, container.unit)
    images = container.open_images(folder, list(files), ignored, stated_column(data_config), title=place.folder)
    return replace(opened, images=images.take(images.find_rows(opened.ids)))


def _choose_files(
    place: Place, found: dict[str, str | None], kind: str, listing: Listing, usage: Usage
) -> dict[str, str | None]:
    """Return the files of the used splits, and the split that each names; UserError if the split to open has none."""
    if not found:
        raise UserError(f"{place.folder} has no {kind}{place.hint}; set data.root to a folder with some")
    if not any(found.values()):
        return found
    used = {name: split for name, split in found.items() if split and listing.find_split(split)}
    rest = Counter(split for name, split in found.items() if name not in used)
    for split, count in rest.items():
        why = why_unused(split, listing.splits) if split else "without a split in their names"
        usage.notes.append(f"has {quantity(count, 'file')} {why}")
    if listing.split not in map(listing.find_split, filter(None, used.values())):
        names = abbreviate(sorted(filter(None, set(found.values()))))
        raise UserError(
            f"{place.folder} has no files of split {listing.split}; its splits are {names}; set data.train_split, "
            "data.val_split and data.test_splits, or hold out images with data.val_fraction"
        )
    return used


def _read_classes(place: Place, name: str) -> Sequence[str]:
    name = os.path.expanduser(name)
    return read_classes(name if os.path.isabs(name) else os.path.join(place.fetch([name]), name))


def stated_column(data_config: ConfigDict) -> str:
    """Return `data.image_column`; "" for the default, which stands for a column that can be found."""
    return "" if data_config.image_column == IMAGE_COLUMN else data_config.image_column


# ------------------------------------------------------------------------------------------------------------- columns
class Plan(NamedTuple):
    """What to read from a file.

    Attributes:
      name: path of the file below the folder of `given`.
      split: the split that the path names; None if it names none.
      columns: all columns of the file.
      image: the column of images, which are paths if `holds_paths`.
      marks: the columns of the split and of the group; None for one that there is not.
      labels: the columns of labels, whose cells `read_labels` converts to names, to codes by name, or None.
      classes: the classes that the file names; None if it names none.
    """

    name: str
    split: str | None
    given: LabelInput
    columns: Sequence[str]
    image: str
    holds_paths: bool
    marks: tuple[str | None, str | None]
    labels: Sequence[str]
    classes: Sequence[str] | None
    read_labels: Callable[[Sequence[Any]], Any]


def _plan_file(name: str, split: str | None, given: LabelInput) -> Plan:
    """Return what to read from a file; UserError if it is damaged, or it is not clear which columns to read."""
    with open_file(given.path) as file:
        schema = file.schema_arrow
    return plan_columns(schema, find_image_column(schema, stated_column(given.config), given.path), name, split, given)


def plan_columns(schema: pa.Schema, image: str, name: str, split: str | None, given: LabelInput) -> Plan:
    """Return what to read from a file with the columns of a schema, and with images in the column `image`."""
    config, path, columns = given.config, given.path, schema.names
    group = config.group_column and columns[find_column(columns, config.group_column, "data.group_column", path)]
    marks = None if split else find_name(columns, SPLIT_COLUMN), group or None
    labels = _plan_labels(schema, (image, *marks), given)
    return Plan(name, split, given, columns, image, image in find_columns(schema, TEXT), marks, *labels)


def _plan_labels(schema: pa.Schema, others: Sequence[str | None], given: LabelInput) -> tuple:
    """Return `labels`, `classes` and `read_labels` of a plan."""
    name, path = given.config.label_column, given.path
    if name == LABEL_COLUMN and not find_name(schema.names, name):
        name = find_label_column(schema, others, path)
    elif name:
        name = schema.names[find_column(schema.names, name, "data.label_column", path)]
    if name:
        classes = class_names(read_features(schema).get(name))
        return [name], classes, _labels_reader(classes, given)
    booleans = [] if given.config.classes else find_columns(schema, BOOLEAN, others)
    classes = class_columns(booleans or find_columns(schema, NUMBER, others), given)
    return classes, classes, lambda cells: dict(zip(classes, map(_plain, cells), strict=True))


def _own_classes(plans: Sequence[Plan]) -> Sequence[str] | None:
    """Return the classes that the files name; UserError if two files differ."""
    first, *others = plans
    for plan in others:
        if (plan.classes, plan.holds_paths) != (first.classes, first.holds_paths):
            raise UserError(
                f"{plan.given.path} has other classes or another kind of images than {first.given.path}; set data.root "
                "to files of one kind"
            )
    return first.classes


def _note_columns(plans: Sequence[Plan], usage: Usage) -> None:
    """Note which columns are used although no key names them, and which are not used."""
    columns = {column: None for plan in plans for column in plan.columns}
    note_unused(usage, "column", columns, {name for plan in plans for name in (*plan.labels, plan.image, *plan.marks)})
    labels, stated = plans[0].labels, plans[0].given.config.label_column
    if stated and not find_name(labels, stated):
        usage.notes.append(f"has its labels in {abbreviate(labels)}; data.label_column names another column")


# ---------------------------------------------------------------------------------------------------------------- rows
def _read_rows(plan: Plan) -> Iterator[ImageRow]:
    """Yield the rows of a file. The column of images is read only if it has paths."""
    columns = [*plan.labels, *filter(None, plan.marks), *([plan.image] if plan.holds_paths else [])]
    row = 0
    with open_file(plan.given.path) as file, damage_explained(plan.given.path):
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
            for cells in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                yield make_plan_row(plan, row, dict(zip(columns, cells, strict=True)))
                row += 1


def make_plan_row(plan: Plan, row: int | str, cells: Mapping[str, Any]) -> ImageRow:
    """Return row `row` of a file; UserError if its cells do not have the form of labels."""
    labels = [cells[name] for name in plan.labels]
    try:
        image = f"{plan.name}#{row}"
        if plan.holds_paths:
            if not cells[plan.image]:
                raise ValueError("it has no path of an image")
            image = os.path.join(os.path.dirname(plan.name), cells[plan.image])
        split, group = (_plain(cells.get(name)) for name in plan.marks)
        known = plan.read_labels(labels)
        if known is None:
            return ImageRow(image, None, split=plan.split or split)
        return make_row(image, known, plan.split or split, group, 0)
    except Exception as error:  # cells of another form raise errors of many types
        shown = f"{labels[0] if len(labels) == 1 else dict(zip(plan.labels, labels, strict=True))}"
        why = f"{'the value ' if isinstance(error, KeyError) else ''}{error}"
        raise UserError(
            f"{plan.given.path}#{row}, with the labels {shown:.80}, cannot be read: {why}; docs/datasets.md lists the "
            "forms of labels"
        ) from error


def _plain(value: Any) -> Any:
    """Return a cell as other programs would write it without empty cells in its column: 3 for 3.0, None for nan."""
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


def _labels_reader(names: Sequence[str] | None, given: LabelInput) -> Callable[[Sequence[Any]], Any]:
    """Return a function that reads the labels of a row from the only cell. Numbers stand for `names`."""
    separator = given.config.separator
    if names is None and given.config.classes:
        names = given.classes

    def read(cells: Sequence[Any]) -> Any:
        cell = _plain(cells[0])
        if isinstance(cell, str):
            return [name for name in map(str.strip, read_cell_names(cell, separator)) if name]
        if isinstance(cell, dict):
            return {name: _plain(value) for name, value in cell.items()}
        if cell is None or cell == -1:  # -1 is an unknown class of the datasets library
            return None
        values = list(map(_plain, cell)) if isinstance(cell, list) else [cell]
        return values if all(isinstance(value, str) for value in values) else _name_numbers(values, names)

    return read


def _name_numbers(values: Sequence[Any], names: Sequence[str] | None) -> Any:
    """Return names of classes for their numbers, or codes by name for a value per class; ValueError for others."""
    if names is None:
        raise ValueError("numbers need the names of their classes, in their order, in data.classes")
    if len(values) == len(names) > 2 and {*values} <= {0, 1, None}:  # more than two numbers from two would repeat one
        return dict(zip(names, values, strict=True))
    if len(set(values)) < len(values) or not all(type(value) is int and 0 <= value < len(names) for value in values):
        raise ValueError(f"they are not different numbers from 0 to {len(names) - 1}")
    return [names[value] for value in values]


_CONTAINER = Container(
    kind="Parquet files",
    unit="row",
    find=lambda place, usage: find_splits(place, SUFFIX),
    plan=_plan_file,
    read_rows=_read_rows,
    open_images=open_parquet,
)
PARQUET = DataSource(partial(open_container_split, _CONTAINER), reads_classes=True)
