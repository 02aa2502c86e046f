"""Your own images with a table of their labels, as CSV or JSONL.

`data.table` is the path of the table below `data.root`. If it contains {split}, there is one table per split.
Otherwise, a column (or key) `split` assigns rows to splits; without it, the table is the training split, of which
`data.val_fraction` can be held out. Paths of images are relative to `data.images`, which can contain {split} as well.
All listed images are used, including those without labels, which are examples of none of the classes.

CSV, one column with the names of the positive labels; the other labels are negative:

    image,labels
    beach/001.jpg,sea;sand
    beach/002.jpg,

CSV, one column per class (`data.label_column` is empty): 1 positive, 0 negative, empty unknown (and 1.0 and 0.0, which
other programs write for columns with empty cells):

    image,sea,sand
    beach/001.jpg,1,1
    beach/002.jpg,0,

JSONL, one object per line; labels that a list does not name are negative, labels that an object does not name are
unknown, like null:

    {"image": "beach/001.jpg", "labels": ["sea", "sand"]}
    {"image": "beach/002.jpg", "labels": {"sea": 0, "sand": null}}

The classes are the lines of the file `data.classes`, in this order; without this file, they are the classes of the
model, or for a new model all names in the table, sorted. With `data.classes`, a CSV with one column per class can have
other columns, which are ignored.
"""

import contextlib
import csv
import difflib
import io
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import data_folder, image_files
from mlmoe_jax.data.sources.listed import ids_of, images_folder, refuse_other_splits, relative_to, table_path
from mlmoe_jax.data.sources.source import Source
from mlmoe_jax.data.split import NEGATIVE, POSITIVE, UNKNOWN, Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import formats
from mlmoe_jax.runtime.files import lines_of, open_regular
from mlmoe_jax.runtime.text import some

SPLIT_COLUMN = "split"
CELLS = {"1": POSITIVE, "0": NEGATIVE, "": UNKNOWN, "1.0": POSITIVE, "0.0": NEGATIVE}


class Row(NamedTuple):
    """One image of a table: its line, path, split (None if the table does not name it) and labels (name -> code).

    rest: the code of labels that are not named.
    """

    line: int
    image: str
    split: str | None
    labels: dict[str, int]
    rest: int


def open_table(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of the CSV or JSONL table of `config.data`; its images are in the order of the table.

    classes: the ordered class names with which labels are read if data.classes is empty.
    Raises UserError for a missing or invalid table, column, key or cell, an image that is listed twice, a label that is
    not one of the classes, and, with data.bad_images=error, missing images.
    """
    folder = data_folder(data_config.root, "your images", f"the table {data_config.table}")
    path = table_path(folder, data_config.table, split)
    if data_config.classes:
        classes = read_classes(folder / data_config.classes)
    with _open_text(path) as file:
        if data_config.name == "jsonl":
            rows = _jsonl_rows(file, path, data_config)
        else:
            rows, classes = _csv_rows(file, path, data_config, classes)
        names, listed, labels = _collected(_of_split(rows, path, split, data_config), path, classes)
    below = images_folder(folder, data_config.images, split)
    files = relative_to(below, listed, path)
    images = image_files(below, files, check=data_config.bad_images == "error")
    return Split(split, names, labels, ids_of(files, data_config.images, split), images)


def read_classes(path: Path) -> tuple[str, ...]:
    """Read a file with one class name per line; UserError if it is missing, empty or repeats a name."""
    with _open_text(path) as file:
        names = [line.strip() for line in _text_lines(file, path) if line.strip()]
    if not names or (repeated := _first_repeated(names)):
        wrong = f"names the class '{repeated}' twice" if names else "contains no class names"
        raise UserError(f"{path} {wrong}; write one class name per line")
    return tuple(names)


# ------------------------------------------------------------------------------------------------ rows of either format
def _of_split(rows: Iterable[Row], path: Path, split: str, data_config: ConfigDict) -> Iterator[tuple[Row, bool]]:
    """Yield each row, and whether its image is in `split`; UserError for a missing image, or one that is repeated."""
    whole_table = "{split}" in data_config.table
    seen: set[str] = set()
    others: set[str] = set()
    for row in rows:
        if row.split is None and not whole_table:
            has_none = f"has no {'key' if data_config.name == 'jsonl' else 'column'} '{SPLIT_COLUMN}'"
            refuse_other_splits(path, split, data_config, has_none)
        if row.split is not None and row.split != split:
            others.add(row.split)
            yield row, False
            continue
        if not row.image or row.image in seen:
            wrong = f"lists {row.image} again; delete one of the lines" if row.image else "has no image path"
            raise UserError(f"{path} line {row.line} {wrong}")
        seen.add(row.image)
        yield row, True
    if not seen:
        there = f"no images of split {split}; its splits are {', '.join(sorted(others))}" if others else "no images"
        raise UserError(f"{path} lists {there}")


def _collected(
    rows: Iterable[tuple[Row, bool]], path: Path, known: Sequence[str] | None
) -> tuple[tuple[str, ...], list[str], np.ndarray]:
    """Return the K classes, and the images and label codes i8[N,K] of the rows in the split.

    known: the classes; without them, all names in the table, sorted.
    """
    place = {name: k for k, name in enumerate(known or ())}
    images, outside = [], None
    rest, counts, columns, codes = array("b"), array("i"), array("i"), array("b")
    for row, in_split in rows:
        if in_split or known is None:
            for name in row.labels:
                if name not in place:
                    place[name] = len(place)
                    outside = outside or (row.line, name)
        if in_split:
            images.append(row.image)
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
    return names, images, table


def _outside(path: Path, line: int, name: str, known: Sequence[str], count: int) -> UserError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'" if close else "correct it, or list all classes in the file of data.classes"
    which = f"the first of {count:,} such labels" if count > 1 else "the only such label"
    return UserError(
        f"{path} line {line} has the label '{name}', which is not one of the {len(known)} classes ({which}); {hint}"
    )


# --------------------------------------------------------------------------------------------------------------- JSONL
def _jsonl_rows(file: TextIO, path: Path, data_config: ConfigDict) -> Iterator[Row]:
    image_key, label_key = data_config.image_column, data_config.label_column
    whole_table = "{split}" in data_config.table
    own_split = None
    for line, text in enumerate(_text_lines(file, path), 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
            image, labels = record[image_key], record[label_key]
            split = None if whole_table else record.get(SPLIT_COLUMN)
            own_split = split is not None if own_split is None else own_split
            if not isinstance(image, str) or own_split != isinstance(split, str):
                raise TypeError("a path and a split are text")
            yield Row(line, image, split, _codes(labels), NEGATIVE if isinstance(labels, list) else UNKNOWN)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            a_split = f"a split under '{SPLIT_COLUMN}', " if own_split else ""
            raise UserError(
                f"{path} line {line} should be a JSON object with a path under '{image_key}', {a_split}and under "
                f"'{label_key}' labels as a list of names, or as an object that maps names to 1, 0 or null, not "
                f"{text.strip()[:80]}"
            ) from error


def _codes(labels: Any) -> dict[str, int]:
    """Return the code of each label of a JSON value. Raises ValueError if the value has neither of the two forms."""
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
    """Return the rows of a CSV, and the classes: if it has one column per class, these columns."""
    header, lines = _csv_table(file, path)
    image_at = _column(header, data_config.image_column, "data.image_column", path)
    split_at = header.index(SPLIT_COLUMN) if "{split}" not in data_config.table and SPLIT_COLUMN in header else None
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
            names = formats.split_names(formats.plain(cells[labels_at]), separator)
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
        for line, cells in lines:
            image, split = formats.plain(cells[image_at]), None if split_at is None else cells[split_at]
            yield Row(line, image, split, labels_of(line, cells), NEGATIVE)

    return rows(), classes


def _class_columns(
    header: list[str], data_config: ConfigDict, known: Sequence[str] | None, path: Path
) -> tuple[str, ...]:
    """Return the classes of a CSV with one column per class; UserError if its columns are others."""
    among = [name for name in header if name not in (data_config.image_column, SPLIT_COLUMN)]
    names = tuple(sorted(among)) if known is None else tuple(known)
    for name in names:
        _column(header, name, "the list of classes", path)
    if not among or "" in among:
        wrong = f"a column without a name (column {header.index('') + 1})" if among else "no column of a class"
        raise UserError(f"{path} has {wrong}; write one column per class, or set data.label_column")
    if not data_config.classes and len(among) > len(names):
        raise UserError(
            f"{path} has the column '{next(name for name in among if name not in names)}', which is not one of the "
            f"{len(names)} classes; remove it, or list the class columns in the file of data.classes"
        )
    return names


def _csv_table(file: TextIO, path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the header of a CSV, and its other rows with their line numbers; blank lines are skipped."""
    rows = _csv_lines(file, path)
    header = [formats.plain(name.strip()) for name in next(rows, (0, []))[1]]
    if not header or (repeated := _first_repeated(header)):
        wrong = f"has two columns '{repeated}'" if header else "is empty"
        raise UserError(f"{path} {wrong}; write a line with the column names, then one line per image")
    return header, _of_equal_length(rows, header, path)


def _csv_lines(file: TextIO, path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(_text_lines(file, path), skipinitialspace=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num} is not valid CSV ({error}); correct it") from error


def _of_equal_length(rows, header: list[str], path: Path) -> Iterator[tuple[int, list[str]]]:
    for line, cells in rows:
        if len(cells) != len(header):
            raise UserError(
                f"{path} line {line} has {len(cells)} cells, but there are {len(header)} columns; enclose cells that "
                "contain a comma in double quotes"
            )
        yield line, cells


def _column(header: list[str], name: str, named_by: str, path: Path) -> int:
    if name not in header:
        raise UserError(
            f"{path} has no column '{name}', which {named_by} names (columns: {some(header)}); correct one of the two, "
            "or clear data.label_column if there is one column per class"
        )
    return header.index(name)


# ------------------------------------------------------------------------------------------------------------ the file
@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    try:
        file = io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); correct the path or its permissions") from error
    with file:
        yield file


def _text_lines(file: TextIO, path: Path) -> Iterator[str]:
    try:
        yield from lines_of(file)
    except ValueError as error:  # UnicodeDecodeError is one
        raise UserError(f"{path} is not a text in UTF-8 ({error}); correct it") from error


def _first_repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


TABLE = Source(open_table)
