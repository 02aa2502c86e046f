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

import difflib
import io
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.sources.folders import image_names
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, Row, csv_rows, first_repeated, jsonl_rows
from mlmoe_jax.data.sources.source import Source, data_folder
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, open_regular, read_lines
from mlmoe_jax.runtime.text import some

SPREADSHEETS = (".xlsx", ".xls", ".ods")
_SAVE_AS = "save it as CSV UTF-8, comma delimited, and name it {}"


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
            rows = jsonl_rows(file, path, data_config)
        else:
            rows, classes = csv_rows(file, path, data_config, classes)
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
    if not names or (repeated := first_repeated(names)):
        wrong = f"names the class '{repeated}' twice" if names else "contains no class names"
        raise UserError(f"{path} {wrong}; write one class name per line")
    return tuple(names)


def _open_text(path: Path) -> TextIO:
    return io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="")


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


TABLE = Source(open_table)
