"""Tables of labels, CSV and JSONL, for your own images.

`data.table` is the path of the table below `data.root`. If it contains {split}, there is one table per split.
Otherwise, a column (or key) `split` assigns rows to splits. Without it, the table is the training split, of which
`data.val_fraction` can be held out. Paths of images are relative to `data.images`, which can also contain {split}.
All listed images are used. An image without labels is an example without any class.

CSV, one column with the names of the positive labels; all other labels are negative:

    image,labels
    beach/001.jpg,sea;sand
    beach/002.jpg,

CSV, one column per class (`data.label_column` is empty): 1 positive, 0 negative, empty unknown (and 1.0 and 0.0, which
other programs write for columns with empty cells):

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

The column (or key) `data.group_column` names the group of each image, such as its patient. Images of a group are never
in two parts of a split. An image without a name there (an empty cell, null, or no key) is a group of its own.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.own_images import open_own_images
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, ImageRow, first_repeated
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import formats
from mlmoe_jax.runtime.files import open_text
from mlmoe_jax.runtime.text import abbreviate

CODE_OF_CELL = {"1": POSITIVE, "0": NEGATIVE, "": UNKNOWN, "1.0": POSITIVE, "0.0": NEGATIVE}
CODE_OF_VALUE = {1: POSITIVE, 0: NEGATIVE, None: UNKNOWN}  # in JSON
_NUMBER = re.compile(r"^(\d+)\.0$")  # a number of a group, as other programs write it in a column with empty cells
ReadLabels = Callable[[list[str], int], dict[str, int]]  # (cells of a row, its line) -> label -> code


# --------------------------------------------------------------------------------------------------------------- JSONL
def read_jsonl(
    path: Path, data_config: ConfigDict, folder: Path, classes: Sequence[str] | None
) -> tuple[Iterator[ImageRow], None]:
    """Return the rows of a JSONL file, and None in place of class names.

    Iterating over the rows raises UserError at a line that has another form.
    """
    return _jsonl_rows(path, data_config), None


def _jsonl_rows(path: Path, data_config: ConfigDict) -> Iterator[ImageRow]:
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = _parse_line(text, line, data_config)
            except Exception as error:  # JSON of another form raises errors of many types
                raise UserError(
                    f"{path} line {line} should be a JSON object with a path under '{data_config.image_column}', and "
                    f"under '{data_config.label_column}' labels as a list of names, or as an object that maps names to "
                    f"1, 0 or null, not {text.strip()[:80]}"
                ) from error
            yield row


def _parse_line(text: str, line: int, data_config: ConfigDict) -> ImageRow:
    """Convert a line of JSON to a row. A line of another form raises an exception of any type."""
    record = json.loads(text)
    labels, split = record[data_config.label_column], record.get(SPLIT_COLUMN)
    group = record.get(data_config.group_column) if data_config.group_column else None
    if "" in labels or not isinstance(split, str | None) or not isinstance(group, str | int | None):
        raise ValueError("a label, the split or the group is not a name")
    image, group = os.fspath(record[data_config.image_column]), "" if group is None else str(group).strip()
    if isinstance(labels, list):
        return ImageRow(image, dict.fromkeys(labels, POSITIVE), NEGATIVE, split, group, line)
    codes = {name: CODE_OF_VALUE[value] for name, value in labels.items()}
    return ImageRow(image, codes, UNKNOWN, split, group, line)


# ----------------------------------------------------------------------------------------------------------------- CSV
def read_csv(
    path: Path, data_config: ConfigDict, folder: Path, classes: Sequence[str] | None
) -> tuple[Iterator[ImageRow], Sequence[str] | None]:
    """Return the rows of a CSV table, and its classes.

    The classes are None if the table has one column with label names.

    Raises:
      UserError: a column is missing, or a cell is invalid. Invalid cells raise it during iteration over the rows.
    """
    with open_text(path) as file:
        header = _read_header(csv.reader(file, skipinitialspace=True), path)
    if data_config.label_column:
        return _csv_rows(path, data_config, _names_reader(header, data_config, path)), None
    own_classes = _class_columns(header, data_config, classes, path)
    return _csv_rows(path, data_config, _codes_reader(header, own_classes, path)), own_classes


def _csv_rows(path: Path, data_config: ConfigDict, read_labels: ReadLabels) -> Iterator[ImageRow]:
    with open_text(path) as file:
        reader = csv.reader(file, skipinitialspace=True)
        header = _read_header(reader, path)
        image = find_column(header, data_config.image_column, "data.image_column", path)
        split = header.index(SPLIT_COLUMN) if SPLIT_COLUMN in header else None
        group = None
        if data_config.group_column:
            group = find_column(header, data_config.group_column, "data.group_column", path)
        for line, cells in whole_rows(reader, header, path):
            yield ImageRow(
                formats.unescape_cell(cells[image]),
                read_labels(cells, line),
                split=None if split is None else cells[split],
                group="" if group is None else _NUMBER.sub(r"\1", formats.unescape_cell(cells[group].strip())),
                line=line,
            )


def _read_header(reader: Iterator[list[str]], path: Path) -> list[str]:
    header = [formats.unescape_cell(name.strip()) for name in next(filter(None, reader), [])]
    if not header or (repeated := first_repeated(header)):
        wrong = f"has two columns '{repeated}'" if header else "is empty"
        raise UserError(f"{path} {wrong}; write a line with the column names, then one line per image")
    return header


def _names_reader(header: list[str], data_config: ConfigDict, path: Path) -> ReadLabels:
    """Return a function that reads the labels of a row from the one column that contains label names.

    The function maps (cells of the row, line number) to a dict of label -> code.
    """
    column = find_column(header, data_config.label_column, "data.label_column (empty: a column per class)", path)

    def read_labels(cells: list[str], line: int) -> dict[str, int]:
        names = formats.split_names(formats.unescape_cell(cells[column]), data_config.separator)
        return dict.fromkeys(filter(None, map(str.strip, names)), POSITIVE)

    return read_labels


def _codes_reader(header: list[str], classes: Sequence[str], path: Path) -> ReadLabels:
    """Return a function that reads the labels of a row from one column per class.

    The function maps (cells of the row, line number) to a dict of label -> code, without negative labels.
    """
    columns = [(header.index(name), name) for name in classes]

    def read_labels(cells: list[str], line: int) -> dict[str, int]:
        try:
            return {name: code for at, name in columns if (code := CODE_OF_CELL[cells[at]]) != NEGATIVE}
        except KeyError as error:
            raise UserError(
                f"{path} line {line} has the cell {error.args[0][:80]!r} where 1, 0 or empty should be; correct it, or "
                "set data.label_column if one column contains all names"
            ) from error

    return read_labels


def whole_rows(reader: Any, header: Sequence[str], path: str | os.PathLike) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) for each row of a CSV table. Blank rows are skipped.

    Raises UserError if the number of cells in a row differs from the number of columns.
    """
    for cells in filter(None, reader):
        if len(cells) != len(header):
            raise UserError(
                f"{path} line {reader.line_num} has {len(cells)} cells, but there are {len(header)} columns; enclose "
                "cells that contain a comma in double quotes"
            )
        yield reader.line_num, cells


def read_columns(
    lines: Iterable[str], names: Sequence[str], path: str | os.PathLike
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (line number, cells) for each row of a CSV table, with the cells of the columns `names` only.

    Raises UserError if there is no column of such a name.
    """
    reader = csv.reader(lines)
    header = [name.strip() for name in next(filter(None, reader), [])]
    columns = [find_column(header, name, "its format", path) for name in names]
    for line, cells in whole_rows(reader, header, path):
        yield line, tuple(cells[column] for column in columns)


def _class_columns(
    header: list[str], data_config: ConfigDict, classes: Sequence[str] | None, path: Path
) -> tuple[str, ...]:
    """Return the classes of a CSV table with one column per class; UserError if the columns do not fit the classes."""
    others = (data_config.image_column, data_config.group_column or SPLIT_COLUMN, SPLIT_COLUMN)
    columns = [name for name in header if name not in others]
    if not columns or "" in columns:
        raise UserError(
            f"{path} has {'a column without a name' if columns else 'no column of a class'}; write one column per "
            "class, or set data.label_column"
        )
    names = tuple(sorted(columns)) if classes is None else tuple(classes)
    for name in names:
        find_column(header, name, "the list of classes", path)
    if not data_config.classes and len(columns) > len(names):
        raise UserError(
            f"{path} has the column '{min(set(columns) - set(names))}', which is not one of the {len(names)} classes; "
            "remove it, or list the class columns in the file of data.classes"
        )
    return names


def find_column(header: Sequence[str], name: str, named_by: str, path: str | os.PathLike) -> int:
    """Return the index of the column `name` in `header`; UserError if there is no such column.

    `named_by` is the config key or the list from which the name comes, for the error.
    """
    if name not in header:
        raise UserError(
            f"{path} has no column '{name}', which {named_by} names (columns: {abbreviate(header)}); correct one "
            "of the two"
        )
    return header.index(name)


CSV = DataSource(functools.partial(open_own_images, read_csv))
JSONL = DataSource(functools.partial(open_own_images, read_jsonl))
