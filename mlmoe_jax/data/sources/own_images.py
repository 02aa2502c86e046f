"""Your own images, with a file that lists them and their labels.

The file is a table (tables.py), annotations in COCO's format (coco.py), or the file or folder of a labeling tool
(labeling_formats.py). `data.table` is its path below `data.root`. If it contains {split}, there is one file per split,
and splits that a file names are ignored. Otherwise, the file may name the split of each image, or it is the training
split, of which `data.val_fraction` can be held out. Paths of images are relative to `data.images`, which can also
contain {split}. Images that nobody has labeled are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.sources.folders import image_names
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.data.sources.rows import ImageRow, ListedImages, Listing, read_classes, validated
from mlmoe_jax.data.sources.source import DataSource, data_folder
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.text import abbreviate

TABLES = (".csv", ".json", ".jsonl")
SPREADSHEETS = (".xlsx", ".xls", ".ods")
_SAVE_AS = "save it as CSV UTF-8, comma delimited, and name it {}"

# (file, `config.data`, folder of the images, known classes) -> the rows, and the classes if the file lists them
ReadRows = Callable[[Path, ConfigDict, Path, Sequence[str] | None], tuple[Iterable[ImageRow], Sequence[str] | None]]


def open_own_images(
    read_rows: ReadRows, data_config: ConfigDict, split: str, classes: Sequence[str] | None = None
) -> Split:
    """Open a split of your own images. Its images are in the order of the file.

    Args:
      read_rows: reads the file.
      data_config: `config.data`.
      split: name of the split.
      classes: the ordered class names, if data.classes is empty. If it is None, the file lists the classes, or they are
        all labels in it, sorted.

    Raises:
      UserError: the file is missing or damaged, or as in `validated`.
    """
    path = _find_file(data_config, split)
    if data_config.classes:
        classes = _read_classes(data_config)
    listing = Listing(path, split, "" if "{split}" in data_config.table else data_config.train_split)
    folder = Path(data_config.root).expanduser() / data_config.images.replace("{split}", split)
    with damage_explained(path):
        rows, own_classes = read_rows(path, data_config, folder, classes)
        listed = validated(rows, listing, classes or own_classes)
    if data_config.group_column and not any(listed.groups):
        raise UserError(
            f"{path} has no group in the column '{data_config.group_column}' for any image of split {split}; fill it, "
            "or correct or clear data.group_column"
        )
    return _make_split(data_config, listing, listed, folder)


def _read_classes(data_config: ConfigDict) -> tuple[str, ...]:
    path = Path(data_config.root).expanduser() / data_config.classes
    if data_config.name in FORMATS and FORMATS[data_config.name].read_classes is not None:
        return FORMATS[data_config.name].read_classes(path, data_config)
    return read_classes(path)


def _make_split(data_config: ConfigDict, listing: Listing, listed: ListedImages, folder: Path) -> Split:
    """Return a split of listed images; UserError if an absolute path is not below `folder`.

    If each split has its own `data.images`, ids begin with the name of the split, because file names may be equal.
    """
    start = f"{folder.absolute()}".rstrip("/") + "/"
    outside = [image for image in listed.images if image.startswith("/") and not image.startswith(start)]
    if outside:
        raise UserError(
            f"{listing.path} lists {outside[0]}, which is not below {folder}; set data.images to a folder above all "
            "images, such as /"
        )
    files = [image.removeprefix(start) for image in listed.images]
    ids = [f"{listing.split}/{file}" for file in files] if "{split}" in data_config.images else files
    lines = listed.lines if any(listed.lines) else ()
    images = ImageFiles(folder, files, os.path.basename(listing.path), lines)
    groups = listed.groups if data_config.group_column else None
    return Split(listing.split, listed.classes, listed.labels, ids, images, groups)


# ----------------------------------------------------------------------------------------------------------- the file
def _find_file(data_config: ConfigDict, split: str) -> Path:
    """Return the file or folder of `data.table` for a split; UserError if it does not exist."""
    table = data_config.table
    path = data_folder(data_config, f"the table {table}") / table.replace("{split}", split)
    if not path.exists():
        raise UserError(f"there is no {path} for split {split}; {_advise_on_missing(path, table)}")
    refuse_spreadsheet(path)
    return path


def refuse_spreadsheet(path: str | os.PathLike) -> None:
    """Raise UserError for a file of a spreadsheet program."""
    stem, suffix = os.path.splitext(os.path.basename(path))
    if suffix.lower() in SPREADSHEETS:
        raise UserError(f"{path} is a spreadsheet, which is not read; {_SAVE_AS.format(f'{stem}.csv')}")


def _advise_on_missing(path: Path, table: str) -> str:
    """Return what to do about a missing table. The advice depends on the other files in its folder."""
    entries = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    tables = [entry.name for entry in entries if entry.suffix.lower() in (*TABLES, *SPREADSHEETS)]
    if tables and all(name.lower().endswith(SPREADSHEETS) for name in tables):
        return f"{tables[0]} is a spreadsheet: {_SAVE_AS.format(path.name)}"
    if tables:
        return f"correct data.table, which is {table} (found {abbreviate(tables, 5)})"
    folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if any(map(image_names, folders)):
        names = abbreviate([entry.name for entry in folders], 3)
        return f"write it, or, if the folders there are the classes ({names}), set data.name=folders"
    return f"correct data.table, which is {table}"


def _open_labels(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    return open_own_images(FORMATS[data_config.name].read, data_config, split, classes)


LABELING_TOOL = DataSource(_open_labels)
