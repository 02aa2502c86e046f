"""Your own images with a table of their labels, as CSV or JSONL.

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

import csv
import difflib
import io
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.sources.folders import image_names
from mlmoe_jax.data.sources.source import Source, data_folder
from mlmoe_jax.data.split import NEGATIVE, POSITIVE, UNKNOWN, Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import formats
from mlmoe_jax.runtime.files import damage_explained, open_regular, read_lines
from mlmoe_jax.runtime.text import some

SPLIT_COLUMN = "split"
SPREADSHEETS = (".xlsx", ".xls", ".ods")
_SAVE_AS = "save it as CSV UTF-8, comma delimited, and name it {}"
_NUMBER = re.compile(r"^(\d+)\.0$")  # a number of a group, as other programs write it in a column with empty cells
CELLS = {"1": POSITIVE, "0": NEGATIVE, "": UNKNOWN, "1.0": POSITIVE, "0.0": NEGATIVE}


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


def open_table(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of a CSV or JSONL table. Its images are in the order of the table.

    Args:
      data_config: `config.data`.
      split: name of the split.
      classes: the ordered class names, if data.classes is empty.

    Raises:
      UserError: the table, or a column, key or cell, is missing or invalid, an image is listed twice, or a label is not
        one of the classes.
    """
    path = table_path(data_config, split)
    if data_config.classes:
        classes = read_classes(Path(data_config.root).expanduser() / data_config.classes)
    with damage_explained(path), _open_text(path) as file:
        if data_config.name == "jsonl":
            rows = _jsonl_rows(file, path, data_config)
        else:
            rows, classes = _csv_rows(file, path, data_config, classes)
        classes, files, labels, lines, groups = collect_labels(
            select_rows(rows, path, split, data_config), path, classes
        )
    whole = listed_split(data_config, split, classes, labels, files, path, lines)
    if data_config.group_column and not any(groups):
        raise UserError(
            f"{path} has no group in the column '{data_config.group_column}' for any image of split {split}; fill it, "
            "or correct or clear data.group_column"
        )
    return replace(whole, groups=groups) if data_config.group_column else whole


def read_classes(path: Path) -> tuple[str, ...]:
    """Read a file with one class name per line; UserError if it is missing, empty or repeats a name."""
    with damage_explained(path), _open_text(path) as file:
        names = [line.strip() for line in read_lines(file) if line.strip()]
    if not names or (repeated := _first_repeated(names)):
        wrong = f"names the class '{repeated}' twice" if names else "contains no class names"
        raise UserError(f"{path} {wrong}; write one class name per line")
    return tuple(names)


def _open_text(path: Path) -> TextIO:
    return io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="")


def _first_repeated(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


# ------------------------------------------------------------------- paths of tables, and of the images that they list
def table_path(data_config: ConfigDict, split: str) -> Path:
    """Return the file of `data.table` for a split; UserError if it does not exist."""
    table = data_config.table
    path = data_folder(data_config, f"the table {table}") / table.replace("{split}", split)
    if not path.is_file():
        raise UserError(f"there is no table {path} for split {split}; {_instead_of_table(path, table)}")
    refuse_spreadsheet(path)
    return path


def refuse_spreadsheet(path: str | os.PathLike) -> None:
    """Raise UserError for a file of a spreadsheet program."""
    stem, suffix = os.path.splitext(os.path.basename(path))
    if suffix.lower() in SPREADSHEETS:
        raise UserError(f"{path} is a spreadsheet, which is not read; {_SAVE_AS.format(f'{stem}.csv')}")


def _instead_of_table(path: Path, table: str) -> str:
    """Return what to do about a missing table. The advice depends on the other files in its folder."""
    folder = path.parent
    suffixes = (".csv", ".json", ".jsonl", *SPREADSHEETS)
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    tables = [entry.name for entry in entries if entry.suffix.lower() in suffixes and entry.is_file()]
    if tables and all(Path(name).suffix.lower() in SPREADSHEETS for name in tables):
        return f"{tables[0]} is a spreadsheet: {_SAVE_AS.format(path.name)}"
    below = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if not tables and any(image_names(entry) for entry in below):
        return (
            f"write it, or, if the folders there are the classes ({some([entry.name for entry in below], 3)}), set "
            "data.name=folders"
        )
    others = f" (found {some(tables, 5)})" if tables else ""
    return f"correct data.table, which is {table}{others}"


def image_folder(data_config: ConfigDict, split: str) -> Path:
    """Return the folder `data.images` of a split."""
    return Path(data_config.root).expanduser() / data_config.images.replace("{split}", split)


def listed_split(
    data_config: ConfigDict,
    split: str,
    classes: Sequence[str],
    labels: np.ndarray,
    files: list[str],
    table: Path,
    lines: Sequence[int] = (),
) -> Split:
    """Return a split of listed images.

    If each split has its own `data.images`, ids begin with the name of the split, because file names may be equal.

    Args:
      data_config: `config.data`.
      split: name of the split.
      classes: names of the K classes.
      labels: label codes i8[N,K].
      files: paths of the images, relative to `data.images`, or absolute paths below it.
      table: the table that lists the images.
      lines: line of each image in the table, if it has one line per image.

    Raises:
      UserError: an absolute path is outside `data.images`.
    """
    folder = image_folder(data_config, split)
    start = f"{folder.absolute()}".rstrip("/") + "/"
    if outside := next((file for file in files if file.startswith("/") and not file.startswith(start)), None):
        raise UserError(
            f"{table} lists {outside}, which is not below {folder}; set data.images to a folder above all images, "
            "such as /"
        )
    files = [file.removeprefix(start) for file in files]
    ids = [f"{split}/{file}" for file in files] if "{split}" in data_config.images else files
    return Split(split, tuple(classes), labels, ids, ImageFiles(folder, files, table.name, lines))


def refuse_other_splits(path: Path, split: str, data_config: ConfigDict, lacks: str) -> None:
    """Raise UserError unless `split` is the training split, because a table without splits is the training split."""
    if split != data_config.train_split:
        raise UserError(
            f"{path} {lacks}, so all its images are in split {data_config.train_split} and none in {split}; write one "
            "table per split and use {split} in data.table, or hold out images with data.val_fraction and clear "
            "data.test_splits"
        )


# ---------------------------------------------------------------------------------------------------- rows of a table
def select_rows(rows: Iterable[Row], path: Path, split: str, data_config: ConfigDict) -> Iterator[tuple[Row, bool]]:
    """Yield each row, and whether its image is in `split`; UserError for a missing or repeated image."""
    whole_table = "{split}" in data_config.table
    images: set[str] = set()
    others: set[str] = set()
    for row in rows:
        if row.split is None and not whole_table:
            where = {"csv": f"column '{SPLIT_COLUMN}'", "jsonl": f"key '{SPLIT_COLUMN}'"}.get(
                data_config.name, "splits"
            )
            refuse_other_splits(path, split, data_config, f"has no {where}")
        if row.split is not None and row.split != split:
            others.add(row.split)
            yield row, False
            continue
        if not row.image or row.image in images:
            wrong = f"lists {row.image} again; delete one of the two" if row.image else "has no image path"
            raise UserError(f"{path}{f' line {row.line}' if row.line else ''} {wrong}")
        images.add(row.image)
        yield row, True
    if not images:
        none = f"no images of split {split}; its splits are {', '.join(sorted(others))}" if others else "no images"
        raise UserError(f"{path} lists {none}")


def collect_labels(
    rows: Iterable[tuple[Row, bool]], path: Path, known: Sequence[str] | None
) -> tuple[tuple[str, ...], list[str], np.ndarray, array, list[str]]:
    """Return the K classes, and the images, label codes i8[N,K], lines and groups of the rows in the split.

    Without `known` classes, the classes are all names in the table, sorted.
    """
    place = {name: k for k, name in enumerate(known or ())}
    images, groups, outside = [], [], None
    rest, counts, columns, codes, lines = array("b"), array("i"), array("i"), array("b"), array("q")
    for row, in_split in rows:
        if in_split or known is None:
            for name in row.labels:
                if name not in place:
                    place[name] = len(place)
                    outside = outside or (row.line, name)
        if in_split:
            images.append(row.image)
            groups.append(row.group)
            lines.append(row.line)
            rest.append(row.rest)
            counts.append(len(row.labels))
            columns.extend(map(place.__getitem__, row.labels))
            codes.extend(row.labels.values())
    at = np.frombuffer(columns, np.int32) if columns else np.zeros(0, np.int32)
    if known is not None and outside:
        raise _outside(path, *outside, known, int((at >= len(known)).sum()))
    if not place:
        raise UserError(
            f"{path} contains no labels, so the classes are unknown; correct data.label_column, or set data.classes to "
            "a file that lists the classes"
        )
    names = tuple(sorted(place) if known is None else known)
    rank = {name: k for k, name in enumerate(names)}
    at = np.array([rank[name] for name in place])[at]
    table = np.empty((len(images), len(names)), np.int8)
    table[:] = np.frombuffer(rest, np.int8)[:, None]
    table[np.repeat(np.arange(len(table)), counts), at] = np.frombuffer(codes, np.int8) if codes else 0
    return names, images, table, lines, groups


def _outside(path: Path, line: int, name: str, known: Sequence[str], count: int) -> UserError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'" if close else "correct it, or list all classes in the file of data.classes"
    which = f"the first of {count:,} such labels" if count > 1 else "the only such label"
    at = f" line {line}" if line else ""
    return UserError(
        f"{path}{at} has the label '{name}', which is not one of the {len(known)} classes ({which}); {hint}"
    )


# --------------------------------------------------------------------------------------------------------------- JSONL
def _jsonl_rows(file: TextIO, path: Path, data_config: ConfigDict) -> Iterator[Row]:
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
def _csv_rows(
    file: TextIO, path: Path, data_config: ConfigDict, classes: Sequence[str] | None
) -> tuple[Iterator[Row], Sequence[str] | None]:
    """Return the rows of a CSV, and the classes, which are the columns of a CSV with one column per class."""
    reader = csv.reader(read_lines(file), skipinitialspace=True)
    header = [formats.unescape_cell(name.strip()) for name in next(filter(None, reader), [])]
    if not header or (repeated := _first_repeated(header)):
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


TABLE = Source(open_table)
