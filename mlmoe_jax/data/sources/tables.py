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
from itertools import compress
from pathlib import Path
from typing import NamedTuple, TextIO

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
    chosen = _Chosen(path, split, data_config)
    with _open_text(path) as file:
        if data_config.name == "jsonl":
            names, labels = _by_name(_jsonl_rows(file, path, data_config), chosen, classes)
        elif data_config.label_column:
            names, labels = _by_name(_csv_rows(file, path, data_config), chosen, classes)
        else:
            names, labels = _by_column(file, path, data_config, chosen, classes)
    below = images_folder(folder, data_config.images, split)
    files = relative_to(below, chosen.images, path)
    images = image_files(below, files, check=data_config.bad_images == "error")
    return Split(split, names, labels, ids_of(files, data_config.images, split), images)


def read_classes(path: Path) -> tuple[str, ...]:
    """Read a file with one class name per line; UserError if it is missing, empty or repeats a name."""
    with _open_text(path) as file:
        names = [line.strip() for line in _text_lines(file, path) if line.strip()]
    if not names:
        raise UserError(f"{path} contains no class names; write one class name per line")
    if repeated := _first_repeated(names):
        raise UserError(f"{path} names the class '{repeated}' twice; delete one of the lines")
    return tuple(names)


class _Chosen:
    """The images of one split, collected row by row."""

    def __init__(self, path: Path, split: str, data_config: ConfigDict):
        self.path, self.split, self.data_config = path, split, data_config
        # Stored, because reading a config key takes as long as the rest of a row.
        self.whole_table = "{split}" in data_config.table
        self.images: list[str] = []
        self.others: set[str] = set()
        self._seen: set[str] = set()

    def admits(self, line: int, image: str, split: str | None) -> bool:
        """Add an image and return True, or False if it belongs to another split; UserError for an invalid row."""
        if split is None and not self.whole_table:
            has_none = f"has no {'key' if self.data_config.name == 'jsonl' else 'column'} '{SPLIT_COLUMN}'"
            refuse_other_splits(self.path, self.split, self.data_config, has_none)
        if split is not None and split != self.split:
            self.others.add(split)
            return False
        if not image:
            raise UserError(
                f"{self.path} line {line} has no image path; write it under {self.data_config.image_column}"
            )
        if image in self._seen:
            raise UserError(f"{self.path} line {line} lists {image} again; delete one of the lines")
        self._seen.add(image)
        self.images.append(image)
        return True

    def finish(self) -> None:
        """Raise UserError if there are no images; free the memory that was only needed for reading."""
        if not self.images and self.others:
            others = ", ".join(sorted(self.others))
            raise UserError(f"{self.path} has no images of split {self.split}; its splits are {others}")
        if not self.images:
            raise UserError(f"{self.path} lists no images; write one per line")
        self._seen.clear()


# ------------------------------------------------------------------------------------------------------ labels by name
def _by_name(rows: Iterable[Row], chosen: _Chosen, known: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """Add rows to `chosen`; return the K classes and the label codes i8[N,K]."""
    place = {name: k for k, name in enumerate(known or ())}
    outside = None
    rest, counts, columns, codes = array("b"), array("i"), array("i"), array("b")
    for line, image, split, labels, of_rest in rows:
        admitted = chosen.admits(line, image, split)
        if admitted or known is None:
            for name in labels:
                if name not in place:
                    place[name] = len(place)
                    outside = outside or (line, name)
        if admitted:
            rest.append(of_rest)
            counts.append(len(labels))
            columns.extend(map(place.__getitem__, labels))
            codes.extend(labels.values())
    chosen.finish()
    at = np.frombuffer(columns, np.int32) if columns else np.zeros(0, np.int32)
    if known is not None:
        if outside:
            raise _outside(chosen.path, *outside, known, int((at >= len(known)).sum()))
        names = tuple(known)
    else:
        if not place:
            raise UserError(
                f"{chosen.path} contains no labels, so the classes are unknown; correct data.label_column, or set "
                "data.classes to a file that lists the classes"
            )
        names = tuple(sorted(place))
        rank = {name: k for k, name in enumerate(names)}
        at = np.array([rank[name] for name in place])[at]
    table = np.empty((len(chosen.images), len(names)), np.int8)
    table[:] = np.frombuffer(rest, np.int8)[:, None]
    table[np.repeat(np.arange(len(table)), counts), at] = np.frombuffer(codes, np.int8) if codes else 0
    return names, table


def _outside(path: Path, line: int, name: str, known: Sequence[str], count: int) -> UserError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'" if close else "correct it, or list all classes in the file of data.classes"
    which = f"the first of {count:,} such labels" if count > 1 else "the only such label"
    return UserError(
        f"{path} line {line} has the label '{name}', which is not one of the {len(known)} classes ({which}); {hint}"
    )


def _csv_rows(file: TextIO, path: Path, data_config: ConfigDict) -> Iterator[Row]:
    header, rows = _csv_table(file, path)
    image_at = _column(header, data_config.image_column, "data.image_column", path)
    if data_config.label_column not in header:
        raise UserError(
            f"{path} has no column '{data_config.label_column}', which data.label_column names (columns: "
            f"{some(header)}); correct one of the two, or clear data.label_column if there is one column per class"
        )
    labels_at = header.index(data_config.label_column)
    split_at = _split_column(header, data_config)
    separator = data_config.separator
    if not separator:
        raise UserError("data.separator is empty; set it to the text between the label names in a cell, such as ;")
    for line, cells in rows:
        names = formats.split_names(formats.plain(cells[labels_at]), separator)
        labels = {name.strip(): POSITIVE for name in names}
        labels.pop("", None)
        yield Row(line, formats.plain(cells[image_at]), None if split_at is None else cells[split_at], labels, NEGATIVE)


def _jsonl_rows(file: TextIO, path: Path, data_config: ConfigDict) -> Iterator[Row]:
    if not data_config.label_column:
        raise UserError("data.label_column is empty, but jsonl has all labels under one key; set it to that key")
    image_key, label_key = data_config.image_column, data_config.label_column
    whole_table = "{split}" in data_config.table
    own_split = None
    for line, text in enumerate(_text_lines(file, path), 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
            image, given = record[image_key], record[label_key]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {line} is not a complete JSON object ({error}); correct it") from error
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path} line {line} lacks the key '{image_key}' or '{label_key}', which data.image_column and "
                "data.label_column name; write both on every line"
            ) from error
        split = None if whole_table else record.get(SPLIT_COLUMN)
        if own_split is None:
            own_split = split is not None
        codes = _codes(given)
        if codes is None or not isinstance(image, str) or own_split != isinstance(split, str):
            raise UserError(
                f"{path} line {line} should have a path, labels as a list of names or as an object that maps names to "
                f"1, 0 or null{', and a split' if own_split else ''}, not {text.strip()[:80]}"
            )
        yield Row(line, image, split, codes, NEGATIVE if isinstance(given, list) else UNKNOWN)


def _codes(given) -> dict[str, int] | None:
    """Return the code of each label in a JSON value, or None if the value has neither of the two forms."""
    if not isinstance(given, list | dict) or not all(isinstance(name, str) and name for name in given):
        return None
    if isinstance(given, list):
        return dict.fromkeys(given, POSITIVE)
    if all(code is None or code in (0, 1) for code in given.values()):
        return {name: UNKNOWN if code is None else int(code) for name, code in given.items()}
    return None


# ------------------------------------------------------------------------------------------------ one column per class
def _by_column(
    file: TextIO, path: Path, data_config: ConfigDict, chosen: _Chosen, known: Sequence[str] | None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Add the rows of a CSV to `chosen`; return the K classes and the label codes i8[N,K]."""
    header, rows = _csv_table(file, path)
    image_at, split_at = (
        _column(header, data_config.image_column, "data.image_column", path),
        _split_column(header, data_config),
    )
    among = [name for name in header if name not in (data_config.image_column, SPLIT_COLUMN)]
    if "" in among:
        raise UserError(f"{path} has a column without a name (column {header.index('') + 1}); name it or remove it")
    names = tuple(sorted(among)) if known is None else tuple(known)
    if not names:
        raise UserError(
            f"{path} has only the columns {', '.join(header)}; write one column per class, or set data.label_column"
        )
    for name in names:
        _column(header, name, "the list of classes", path)
    if not data_config.classes and len(among) > len(names):
        raise UserError(
            f"{path} has the column '{next(name for name in among if name not in names)}', which is not one of the "
            f"{len(names)} classes; remove it, or list the class columns in the file of data.classes"
        )
    wanted = set(names)
    is_class = [name in wanted for name in header]
    codes = {cell: code % 256 for cell, code in CELLS.items()}
    table = bytearray()
    for line, cells in rows:
        if chosen.admits(line, formats.plain(cells[image_at]), None if split_at is None else cells[split_at]):
            try:
                table.extend(map(codes.__getitem__, compress(cells, is_class)))
            except KeyError as error:
                at = next(at for at, cell in enumerate(cells) if is_class[at] and cell not in codes)
                raise UserError(
                    f"{path} line {line}, column '{header[at]}' should be 1, 0 or empty, not {cells[at][:80]!r}; "
                    "correct it, or set data.label_column if one column contains all names"
                ) from error
    chosen.finish()
    in_header = {name: k for k, name in enumerate(compress(header, is_class))}
    labels = np.frombuffer(table, np.int8).reshape(-1, len(names))
    return names, labels.take([in_header[name] for name in names], axis=1)


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
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except ValueError as error:
        raise UserError(f"{path} is not a table: {error}") from error


def _not_utf8(path: Path) -> UserError:
    return UserError(f"{path} is not UTF-8 text; save it as UTF-8")


def _csv_table(file: TextIO, path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the header of a CSV, and its other rows with their line numbers; blank lines are skipped."""
    rows = _csv_lines(file, path)
    _, header = next(rows, (0, []))
    header = [formats.plain(name.strip()) for name in header]
    if not header:
        raise UserError(f"{path} is empty; write a line with the column names, then one line per image")
    if repeated := _first_repeated(header):
        raise UserError(f"{path} has two columns '{repeated}'; rename or remove one")
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
            f"{path} has no column '{name}', which {named_by} names (columns: {some(header)}); correct one of the two"
        )
    return header.index(name)


def _split_column(header: list[str], data_config: ConfigDict) -> int | None:
    return header.index(SPLIT_COLUMN) if "{split}" not in data_config.table and SPLIT_COLUMN in header else None


def _first_repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


TABLE = Source(open_table)
