"""Your own images, with a file that lists them and their labels.

The file is a table (tables.py), annotations in COCO's format (coco.py), or the file or folder of a labeling tool
(labeling_formats.py). `data.table` is its path below `data.root`. If it contains {split}, there is one file per split,
and splits that a file names are ignored. Otherwise, the file may name the split of each image, or it is the training
split, of which `data.val_fraction` can be held out. Paths of images are relative to `data.images`, which can also
contain {split}. Images that nobody has labeled are left out and counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.data.names import is_no_value
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.data.sources.rows import LabelInput, Listing, ReadRows, select_split
from mlmoe_jax.data.sources.source import DataSource, data_folder, used_splits
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained

SPREADSHEETS = (".xlsx", ".xls", ".ods")


def open_own_images(
    read_rows: ReadRows, data_config: ConfigDict, split: str, classes: Sequence[str] | None = None
) -> Split:
    """Open a split of images that a file of the user lists, in the order of the file.

    If each split has its own folder `data.images`, ids begin with the name of the split. The classes are the first of
    these that exists: the file `data.classes`, `classes`, the classes that the file lists, all labels in the file,
    sorted by name. Raises UserError as `select_split`, and if the file is missing or damaged.
    """
    table = data_config.table
    root = data_folder(data_config, f"the table {table}")
    path = root / table.replace("{split}", split)
    if not path.exists():
        raise UserError(f"there is no {path} for split {split}; correct data.table, which is {table}")
    refuse_spreadsheet(path)
    if data_config.classes:
        classes = _read_classes(root / data_config.classes, data_config)
    folder = root / data_config.images.replace("{split}", split)
    has_one_split = "{split}" in table
    listing = Listing(
        path,
        split,
        folder,
        "" if has_one_split else data_config.train_split,
        (split,) if has_one_split else used_splits(data_config, split),
    )
    usage = Usage(f"{path}", "image")
    with damage_explained(path):
        rows, own_classes = read_rows(LabelInput(path, data_config, folder, classes, usage))
        opened = select_split(rows, listing, classes or own_classes, usage)
    _require_groups_and_paths(opened, path, data_config.group_column)
    if "{split}" in data_config.images:  # file names of different splits may be equal
        return replace(opened, ids=[f"{split}/{image}" for image in opened.ids])
    return opened


def _require_groups_and_paths(split: Split, path: Path, group_column: str) -> None:
    """Raise UserError if no image has a group in `group_column`, a group is a text like nan, or a path is absolute."""
    if group_column and split.groups is None:
        raise UserError(
            f"{path} has no group in the column '{group_column}' for any image of split {split.name}; fill it, or "
            "correct or clear data.group_column"
        )
    if wrong := next(filter(is_no_value, split.groups or ()), ""):
        raise UserError(
            f"{path} has the group '{wrong}', which stands for no value; leave it empty where an image is a group of "
            "its own"
        )
    if outside := next((image for image in split.ids if image.startswith("/")), ""):
        raise UserError(
            f"{path} lists {outside}, which is not below {split.images.folder}; set data.images to a folder above all "
            "images, such as /"
        )


def _read_classes(path: Path, data_config: ConfigDict) -> Sequence[str]:
    if data_config.name in FORMATS and (read := FORMATS[data_config.name].read_classes):
        return read(path, data_config)
    return read_classes(path)


def refuse_spreadsheet(path: PathLike) -> None:
    """Raise UserError if a path has the suffix of a spreadsheet program."""
    if os.fspath(path).lower().endswith(SPREADSHEETS):
        raise UserError(f"{path} is a spreadsheet, which is not read; save it as CSV UTF-8, comma delimited")


LABELING_TOOL = DataSource(
    lambda data_config, *which: open_own_images(FORMATS[data_config.name].read, data_config, *which), reads_classes=True
)
