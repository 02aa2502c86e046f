"""The rows of a table of labels, read from CSV and JSONL; readers of labeling tools return the same type."""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import formats
from mlmoe_jax.runtime.files import read_lines
from mlmoe_jax.runtime.text import some

SPLIT_COLUMN = "split"
CELLS = {"1": POSITIVE, "0": NEGATIVE, "": UNKNOWN, "1.0": POSITIVE, "0.0": NEGATIVE}
_NUMBER = re.compile(r"^(\d+)\.0$")  # a number of a group, as other programs write it in a column with empty cells


class Row(NamedTuple):
    """One image of a table.

    Attributes:
      line: its line in the table; 0 in a file without a line per image.
      image: its path.
      split: its split, None if the table has no splits.
      labels: name -> code.
      rest: the code of all other labels.
      group: the name of its group, "" if it is a group of its own.
    """

    line: int
    image: str
    split: str | None
    labels: dict[str, int]
    rest: int
    group: str = ""


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that is there twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


# --------------------------------------------------------------------------------------------------------------- JSONL
def jsonl_rows(file: TextIO, path: Path, data_config: ConfigDict) -> Iterator[Row]:
    """Yield the rows of a JSONL file; UserError for a line of another form."""
    image_key, label_key, group_key = data_config.image_column, data_config.label_column, data_config.group_column
    whole_table = "{split}" in data_config.table
    own_split = None
    for line, text in enumerate(read_lines(file), 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
            image, labels = record[image_key], record[label_key]
            split = None if whole_table else record.get(SPLIT_COLUMN)
            own_split = split is not None if own_split is None else own_split
            group = record.get(group_key) if group_key else None
            group = "" if group is None else group
            if not isinstance(image, str) or own_split != isinstance(split, str) or type(group) not in (str, int):
                raise TypeError("a path and a split are text, and a group is text or a whole number")
            rest = NEGATIVE if isinstance(labels, list) else UNKNOWN
            yield Row(line, image, split, _codes(labels), rest, str(group).strip())
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            a_split = f"a split under '{SPLIT_COLUMN}', " if own_split else ""
            a_split += f"a name or nothing under '{group_key}', " if group_key else ""
            raise UserError(
                f"{path} line {line} should be a JSON object with a path under '{image_key}', {a_split}and under "
                f"'{label_key}' labels as a list of names, or as an object that maps names to 1, 0 or null, not "
                f"{text.strip()[:80]}"
            ) from error


def _codes(labels: Any) -> dict[str, int]:
    """Return the code of each label of a JSON value; ValueError for a value of another form."""
    if isinstance(labels, list | dict) and all(isinstance(name, str) and name for name in labels):
        if isinstance(labels, list):
            return dict.fromkeys(labels, POSITIVE)
        if all(code is None or code in (0, 1) for code in labels.values()):
            return {name: UNKNOWN if code is None else int(code) for name, code in labels.items()}
    raise ValueError("labels are a list of names, or map names to 1, 0 or null")


# ----------------------------------------------------------------------------------------------------------------- CSV
def csv_rows(
    file: TextIO, path: Path, data_config: ConfigDict, classes: Sequence[str] | None
) -> tuple[Iterator[Row], Sequence[str] | None]:
    """Return the rows of a CSV, and the classes, which are the columns of a CSV with one column per class.

    Raises UserError, also while rows are read, if a column is missing or a cell is invalid.
    """
    reader = csv.reader(read_lines(file), skipinitialspace=True)
    header = [formats.unescape_cell(name.strip()) for name in next(filter(None, reader), [])]
    if not header or (repeated := first_repeated(header)):
        wrong = f"has two columns '{repeated}'" if header else "is empty"
        raise UserError(f"{path} {wrong}; write a line with the column names, then one line per image")
    image_at = _column(header, data_config.image_column, "data.image_column", path)
    split_at = header.index(SPLIT_COLUMN) if "{split}" not in data_config.table and SPLIT_COLUMN in header else None
    named = data_config.group_column
    group_at = _column(header, named, "data.group_column", path) if named else None
    separator, by_name = data_config.separator, bool(data_config.label_column)  # reading a config key is slow
    if by_name:
        labels_at = _column(header, data_config.label_column, "data.label_column", path)
        if not separator:
            raise UserError("data.separator is empty; set it to the text between the label names in a cell, such as ;")
    else:
        classes = _class_columns(header, data_config, classes, path)
        columns = [(header.index(name), name) for name in classes]

    def labels_of(line: int, cells: list[str]) -> dict[str, int]:
        if by_name:
            names = formats.split_names(formats.unescape_cell(cells[labels_at]), separator)
            return dict.fromkeys(filter(None, map(str.strip, names)), POSITIVE)
        try:
            return {name: code for at, name in columns if (code := CELLS[cells[at]]) != NEGATIVE}
        except KeyError as error:
            at = next(at for at, _ in columns if cells[at] not in CELLS)
            raise UserError(
                f"{path} line {line}, column '{header[at]}' should be 1, 0 or empty, not {cells[at][:80]!r}; correct "
                "it, or set data.label_column if one column contains all names"
            ) from error

    def rows() -> Iterator[Row]:
        for line, cells in whole_rows(reader, header, path):
            image, split = formats.unescape_cell(cells[image_at]), None if split_at is None else cells[split_at]
            group = "" if group_at is None else formats.unescape_cell(cells[group_at].strip())
            yield Row(line, image, split, labels_of(line, cells), NEGATIVE, _NUMBER.sub(r"\1", group))

    return rows(), classes


def whole_rows(reader: Any, header: Sequence[str], path: str | os.PathLike) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row of a CSV reader that is not blank; UserError for another length."""
    for cells in filter(None, reader):
        if len(cells) != len(header):
            raise UserError(
                f"{path} line {reader.line_num} has {len(cells)} cells, but there are {len(header)} columns; enclose "
                "cells that contain a comma in double quotes"
            )
        yield reader.line_num, cells


def _class_columns(
    header: list[str], data_config: ConfigDict, known: Sequence[str] | None, path: Path
) -> tuple[str, ...]:
    """Return the classes of a CSV with one column per class; UserError if its columns are not the classes."""
    others = (data_config.image_column, data_config.group_column or SPLIT_COLUMN, SPLIT_COLUMN)
    columns = [name for name in header if name not in others]
    names = tuple(sorted(columns)) if known is None else tuple(known)
    for name in names:
        _column(header, name, "the list of classes", path)
    if not columns or "" in columns:
        wrong = f"a column without a name (column {header.index('') + 1})" if columns else "no column of a class"
        raise UserError(f"{path} has {wrong}; write one column per class, or set data.label_column")
    if not data_config.classes and len(columns) > len(names):
        raise UserError(
            f"{path} has the column '{next(name for name in columns if name not in names)}', which is not one of the "
            f"{len(names)} classes; remove it, or list the class columns in the file of data.classes"
        )
    return names


def _column(header: list[str], name: str, named_by: str, path: Path) -> int:
    if name not in header:
        similar = next((one for one in header if one.strip().casefold() == name.casefold()), None)
        separator = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), None)
        if similar is not None:
            key = named_by if named_by.startswith("data.") else "the name there"
            fix = f"the case of letters counts: rename '{similar}' to '{name}', or set {key} to {similar}"
        elif separator is not None:
            fix = f"its columns are separated by {separator!r}: save it as a CSV with commas"
        else:
            grouped = named_by == "data.group_column"
            unset = named_by if grouped else "data.label_column if there is one column per class"
            fix = f"correct one of the two, or clear {unset}"
        raise UserError(f"{path} has no column '{name}', which {named_by} names (columns: {some(header)}); {fix}")
    return header.index(name)
