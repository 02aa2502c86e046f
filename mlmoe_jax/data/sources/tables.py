"""Tables of labels, CSV and JSONL, for your own images.

`data.table` is the path of the table below `data.root`. If it contains {split}, there is one table per split.
Otherwise, a column (or key) `split` assigns rows to splits, in any usual spelling. Without it, the table is the
training split, of which `data.val_fraction` can be held out. Paths of images are relative to `data.images`, which can
also contain {split}. An image without labels is an example without any class. The rows of an image are merged. Rows of
other splits are left out and counted. So are rows without a split if other rows have one.

CSV, one column with the names of the positive labels; all other labels are negative:

    image,labels
    beach/001.jpg,sea;sand
    beach/002.jpg,

A cell can also be a list of names in JSON or Python, as other programs write it.

CSV, one column per class (`data.label_column` is empty): 1 positive, 0 negative, empty unknown (and 1.0, 0.0, True and
False, as other programs write them):

    image,sea,sand
    beach/001.jpg,1,1
    beach/002.jpg,0,

JSONL, one object per line. Labels that are missing in a list are negative. Labels that are missing in an object are
unknown, like null:

    {"image": "beach/001.jpg", "labels": ["sea", "sand"]}
    {"image": "beach/002.jpg", "labels": {"sea": 0, "sand": null}}

The classes are the lines of the file `data.classes`, in this order. Without this file, they are the classes of the
model, or for a new model all names in the table, sorted. With `data.classes`, a CSV with one column per class can have
other columns, which are ignored.

Columns (or keys) with the names of attributes (`data.attributes`) have a value of each, or nothing for unknown:

    image,labels,color
    beach/001.jpg,sea;sand,red

The column (or key) `data.group_column` names the group of each image, such as its patient. Images of a group are never
in two parts of a split. An image without a name there (an empty cell, null, or no key) is a group of its own.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlmoe_jax.data.label_codes import CODE_OF_CELL, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.names import find_name, first_repeated
from mlmoe_jax.data.sources.own_images import open_own_images
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, ImageRow, LabelRows, Listing
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.data.usage import LeftOut, Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import formats
from mlmoe_jax.runtime.files import PathLike, open_text
from mlmoe_jax.runtime.text import abbreviate, compose, quantity

ERROR_COLUMN = "error"  # in a table of predictions: why the image could not be read, so that it has no labels
CODE_OF_VALUE = {1: POSITIVE, 0: NEGATIVE, None: UNKNOWN}  # in JSON
_NUMBER = re.compile(r"^(\d+)\.0$")  # a number of a group, as other programs write it in a column with empty cells
_BREAK = re.compile(r"[\n\r]")
ReadLabels = Callable[[list[str], int], dict[str, int]]  # (cells of a row, its line) -> label -> code


# --------------------------------------------------------------------------------------------------------------- JSONL
def read_jsonl(given: Listing) -> LabelRows:
    """Return the rows of a JSONL file, and no classes. A line of another form raises UserError in the iteration."""
    given.usage.unit = "row"
    return _jsonl_rows(given), None


def _jsonl_rows(given: Listing) -> Iterator[ImageRow]:
    path, config, known = given.path, given.config, {}

    @functools.lru_cache(maxsize=1 << 10)  # most lines have equal keys
    def find_keys(keys: tuple[str, ...]) -> tuple[str | None, str | None, str | None, Marks]:
        known.update(dict.fromkeys(keys))
        names = config.image_column, config.label_column, ERROR_COLUMN
        return *(find_name(keys, name) for name in names), find_marks(keys, given)

    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                record = json.loads(text, object_pairs_hook=_unique)
                image, labels, error, marks = find_keys(tuple(record))
                stated = record.get(labels)
                labeled = stated is not None or error is None
                row = make_row(record.get(image), stated, record, marks, given, labeled=labeled)
            except Exception as error:  # JSON of another form raises errors of many types
                raise UserError(
                    f"{path} line {line} should be a JSON object with a path under '{config.image_column}', and "
                    f"under '{config.label_column}' labels as a list of names, or as an object that maps names to "
                    f"1, 0 or null, not {text.strip()[:80]}"
                ) from error
            yield row._replace(line=line)
    image, labels, error, marks = find_keys(tuple(known))
    note_unused(given.usage, "key", known, (image, labels, error, *marks.columns))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dict; ValueError if a key is repeated."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is repeated")
    return record


def make_row(
    image: Any, labels: Any, cells: Mapping[str, Any], marks: Marks, given: Listing, *, labeled: bool = True
) -> ImageRow:
    """Convert the values of an image, as JSON or a container has them, to a row; without labels unless `labeled`.

    `labels` are a list of names, or codes by name, or None if there are attributes alone. A value of another form
    raises an exception of any type.
    """
    split, group = (plain_value(cells.get(column)) for column in (marks.split, marks.group))
    values = given.attributes.read_cells({name: plain_value(cells[column]) for name, column in marks.own.items()})
    if labels is None and (values or not labeled):
        labels = []
    if "" in labels or not isinstance(group, str | int | None) or not isinstance(split, str | int | None):
        raise ValueError("a label, the split or the group is not a name")
    split, group = (None if split is None else str(split)), ("" if group is None else str(group).strip())
    if not labeled:
        return ImageRow(os.fspath(image), None, split=split, group=group)
    if isinstance(labels, list):
        return ImageRow(os.fspath(image), dict.fromkeys(labels, POSITIVE) | values, NEGATIVE, split, group)
    codes = {name: CODE_OF_VALUE[value] for name, value in labels.items()}
    return ImageRow(os.fspath(image), codes | values, UNKNOWN, split, group)


def plain_value(value: Any) -> Any:
    """Return a value as other programs would write it without empty cells in its column: 3 for 3.0, None for nan."""
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


# ------------------------------------------------------------------------------------------------------------- columns
class Marks(NamedTuple):
    """The columns or keys of the split, the group and, by name, the attributes of an image; None for a missing one."""

    split: str | None
    group: str | None
    own: Mapping[str, str]

    @property
    def columns(self) -> Sequence[str | None]:
        return self.split, self.group, *self.own.values()


def find_marks(names: Sequence[str], given: Listing, path: PathLike = "") -> Marks:
    """Return the marks among the columns `names` of the file `path`; UserError if it lacks the column of groups.

    Without `path`, the column may be missing.
    """
    group = given.config.group_column
    if path and group:
        find_column(names, group, "data.group_column", path)
    own = {name: column for name in given.attributes.values if (column := find_name(names, name))}
    return Marks(find_name(names, SPLIT_COLUMN), find_name(names, group) if group else None, own)


def find_column(header: Sequence[str], name: str, named_by: str, path: PathLike) -> str:
    """Return the element of `header` that is the column `name`, see `find_name`; UserError if there is none.

    `named_by` is the config key or the list from which the name comes, for the error.
    """
    if (column := find_name(header, name)) is None:
        marks = [mark for mark in ";\t|" if len(header) == 1 and mark in header[0]]
        remedy = f"save it with commas instead of {marks[0]!r}" if marks else "correct one of the two"
        raise UserError(
            f"{path} has no column '{name}', which {named_by} names (columns: {abbreviate(header)}); {remedy}"
        )
    return column


def note_unused(usage: Usage, noun: str, columns: Iterable[str], used: Collection[str | None]) -> None:
    """Add a note about columns or keys that are not used to the account of a table."""
    if unused := [column for column in columns if column not in used]:
        shown = [column or "one without a name" for column in unused]
        usage.notes.append(f"has {quantity(len(unused), noun)} that no key of the config names: {abbreviate(shown)}")


# ----------------------------------------------------------------------------------------------------------------- CSV
def read_csv(given: Listing) -> LabelRows:
    """Return the rows of a CSV table, and its classes, None if the table has one column with label names.

    Raises UserError if a column is missing, or, in the iteration over the rows, if a cell is invalid.
    """
    path, config = given.path, given.config
    with open_text(path) as file:
        header = _read_header(csv.reader(file, skipinitialspace=True), path)
    image = find_column(header, config.image_column, "data.image_column", path)
    marks = find_marks(header, given, path)
    error = find_name(header, ERROR_COLUMN) if config.label_column else None
    others = [name for name in header if name not in (image, error, *marks.columns)]
    if config.label_column and marks.own and not find_name(header, config.label_column):  # there are attributes alone
        classes, used, read_labels = None, (), lambda cells, line: {}
    elif config.label_column:
        labels = find_column(header, config.label_column, "data.label_column (empty: a column per class)", path)
        classes, used = None, (labels,)
        read_labels = _names_reader(header.index(labels), config.separator, path)
    else:
        classes = used = class_columns(others, path, given)
        read_labels = _codes_reader(header, classes, path)
    given.usage.unit = "row"
    note_unused(given.usage, "column", others, used)
    return _csv_rows(given, image, error, marks, read_labels, is_complete=bool(classes)), classes


def _csv_rows(
    given: Listing, image: str, error: str | None, marks: Marks, read_labels: ReadLabels, *, is_complete: bool
) -> Iterator[ImageRow]:
    """Yield the rows of a table. `image` and `error` are columns."""
    read = formats.unescape_cell
    with open_text(given.path) as file:
        reader = csv.reader(file, skipinitialspace=True)
        place = {name: at for at, name in enumerate(_read_header(reader, given.path))}
        image, split, group = columns = [place.get(name) for name in (image, marks.split, marks.group)]
        own = {name: place[column] for name, column in marks.own.items()}
        for line, cells in whole_rows(reader, place, given.path, given.usage, columns):
            values = given.attributes.read_cells({name: read(cells[at]) for name, at in own.items()})
            labels = read_labels(cells, line) | values
            is_unread = error is not None and cells[place[error]] and not labels
            yield ImageRow(
                read(cells[image]),
                None if is_unread else labels,
                NEGATIVE,
                None if split is None else cells[split],
                "" if group is None else _NUMBER.sub(r"\1", read(cells[group].strip())),
                line,
                is_complete,
            )


def _read_header(reader: Iterator[list[str]], path: Path) -> list[str]:
    header = [formats.unescape_cell(compose(name.strip())) for name in next(filter(None, reader), [])]
    if not header or (repeated := first_repeated(header)):
        wrong = f"has two columns '{repeated}'" if header else "is empty"
        raise UserError(f"{path} {wrong}; write a line with the column names, then one line per image")
    return header


def _names_reader(column: int, separator: str, path: Path) -> ReadLabels:
    """Return a function that reads the labels of a row from the one column that contains label names."""

    if not separator:
        raise UserError("data.separator is empty; set it to the text between the names in a cell")

    @functools.lru_cache(maxsize=1 << 12)  # most tables repeat their cells
    def read_cell(cell: str) -> dict[str, int]:
        names = formats.read_cell_names(formats.unescape_cell(cell), separator)
        return dict.fromkeys(filter(None, map(str.strip, names)), POSITIVE)

    def read_labels(cells: list[str], line: int) -> dict[str, int]:
        try:
            return read_cell(cells[column])
        except ValueError as error:
            raise UserError(
                f"{path} line {line} has the labels {cells[column][:80]!r}, {error}; write names with {separator!r} "
                "between them"
            ) from error

    return read_labels


def _codes_reader(header: list[str], classes: Sequence[str], path: Path) -> ReadLabels:
    """Return a function that reads the labels of a row from one column per class. Negative labels are left out."""
    columns = [(header.index(compose(name)), name) for name in classes]

    def read_labels(cells: list[str], line: int) -> dict[str, int]:
        try:
            return {name: code for at, name in columns if (code := CODE_OF_CELL[cells[at]]) != NEGATIVE}
        except KeyError as error:
            wrong = next(name for at, name in columns if cells[at] not in CODE_OF_CELL)
            raise UserError(
                f"{path} line {line} has the cell {error.args[0][:80]!r} in the column '{wrong}', where 1, 0 or empty "
                "for unknown should be; correct it, list the columns that are classes in the file of data.classes, or "
                "set data.label_column if one column contains all names"
            ) from error

    return read_labels


def whole_rows(
    reader: Any,
    header: Collection[str],
    path: PathLike,
    usage: Usage | None = None,
    columns: Sequence[int | None] = (),
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) for each row of a CSV table. Blank rows are skipped.

    `usage` gets a note about rows of several lines, because an unclosed quote joins many lines to one row. Raises
    UserError if the number of cells in a row differs from the number of columns, or if there is a line break in a cell
    of `columns`.
    """
    end, lines, quoted = reader.line_num, 0, LeftOut()
    try:
        for cells in reader:
            line, end = end + 1, reader.line_num
            if not cells:
                continue
            if len(cells) != len(header):
                raise UserError(
                    f"{path} line {line} has {len(cells)} cells, but there are {len(header)} columns; enclose cells "
                    "that contain a comma in double quotes, and close all quotes"
                )
            if end > line:
                lines += end - line
                quoted.add(f"lines {line} to {end}")
                if broken := [cells[at] for at in columns if at is not None and _BREAK.search(cells[at])]:
                    raise UserError(
                        f"{path} line {line} has a line break in the cell {broken[0][:80]!r}; close the quote before it"
                    )
            yield line, cells
    except csv.Error as error:
        raise UserError(
            f"{path} cannot be read from line {end + 1} on: {error}; close the quote before its text"
        ) from error
    if usage and lines:
        usage.notes.append(
            f"has {quantity(lines, 'line')} inside of quotes{quoted}, which belong to the cells of the line before; "
            "close the quotes if they are rows"
        )


def read_columns(text: str, names: Sequence[str], path: PathLike) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (line number, cells of the columns `names`) of each row of a CSV; UserError if a column is missing."""
    reader = csv.reader(text.splitlines())
    header = _read_header(reader, path)
    columns = [header.index(find_column(header, name, "its format", path)) for name in names]
    for line, cells in whole_rows(reader, header, path):
        yield line, tuple(cells[column] for column in columns)


def class_columns(columns: Sequence[str], path: PathLike, given: Listing) -> tuple[str, ...]:
    """Return the classes of a CSV table with a column per class; UserError if these `columns` do not fit them."""
    if not (columns or given.attributes.values) or "" in columns:
        raise UserError(
            f"{path} has {'a column without a name' if columns else 'no column of a class'}; write one column per "
            "class, or set data.label_column"
        )
    names = tuple(sorted(columns)) if given.classes is None else _columns_of_classes(columns, given)
    if missing := [name for name in names if name not in columns]:
        raise UserError(
            f"{path} has no column '{missing[0]}', which the list of classes names (columns: {abbreviate(columns)}); "
            "correct one of the two"
        )
    further = set(columns) - set(names)
    if further and not given.config.classes:
        raise UserError(
            f"{path} has the column '{min(further)}', which is not one of the {len(names)} classes; remove it, or list "
            "the class columns in the file of data.classes"
        )
    return names


def _columns_of_classes(columns: Sequence[str], given: Listing) -> tuple[str, ...]:
    """Return the column of each known class. Values of attributes without one have a column of their attribute."""
    attributes = given.attributes
    spelled = {attributes.spell(column): column for column in columns}
    names = [attributes.spell(compose(name)) for name in given.classes]
    return tuple(spelled.get(name, name) for name in names if name in spelled or not attributes.owns(name))


CSV = DataSource(functools.partial(open_own_images, read_csv), reads_classes=True)
JSONL = DataSource(functools.partial(open_own_images, read_jsonl), reads_classes=True)
