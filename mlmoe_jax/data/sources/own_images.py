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

from mlmoe_jax.data.image_search import is_skipped
from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.data.names import STANDARD_SPLITS, find_split, split_key
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.data.sources.rows import Listing, ReadRows, select_split, why_unused
from mlmoe_jax.data.sources.source import DataSource, data_folder, used_splits
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained


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
    split_of_file = _find_splits(root, table, used_splits(data_config, split))
    spelled = next((name for name, found in split_of_file.items() if found == split), split)
    path = root / table.replace("{split}", spelled)
    if not path.exists():
        raise UserError(f"there is no {path} for split {split}; correct data.table, which is {table}")
    if data_config.classes:
        classes = _read_classes(root / data_config.classes, data_config)
    folder = root / data_config.images.replace("{split}", spelled)
    listing = Listing(path, split, folder, classes, data_config, has_splits="{split}" not in table)
    with damage_explained(path):
        rows, own_classes = read_rows(listing)
        opened = select_split(rows, listing, own_classes)
    rest = [name for name, found in split_of_file.items() if found is None]
    if rest and split == data_config.train_split:
        opened = replace(opened, usage=(*opened.usage, _count_rest(read_rows, data_config, root, rest)))
    if "{split}" in data_config.images:  # file names of different splits may be equal
        return replace(opened, ids=[f"{split}/{image}" for image in opened.ids])
    return opened


def _find_splits(root: Path, table: str, splits: Sequence[str]) -> dict[str, str | None]:
    """Return name in place of {split} in the path of an existing file -> its split; None if no split uses the file.

    A name may be another spelling of a split, such as "valid", if no file has the name of the split.
    """
    start, mark, rest = table.partition("{split}")
    folder, prefix = os.path.split(start)
    suffix, _, below = rest.partition("/")
    if not mark or not (root / folder).is_dir():
        return {}
    found: dict[str, str | None] = {}
    names = {file.removeprefix(prefix).removesuffix(suffix) for file in os.listdir(root / folder)}
    for name in sorted(names, key=lambda name: (name not in splits, name)):
        is_split = bool(prefix or below) or name in splits or split_key(name) in STANDARD_SPLITS
        if is_split and not is_skipped(name) and (root / table.replace("{split}", name)).exists():
            split = find_split(name, splits)
            found[name] = None if split in found.values() else split
    return found


def _count_rest(read_rows: ReadRows, data_config: ConfigDict, root: Path, names: Sequence[str]) -> Usage:
    """Return the account of the files whose {split} is one of `names`, which no split uses."""
    usage = Usage(f"{root / data_config.table}", "image")
    splits = used_splits(data_config, data_config.train_split)
    for name in names:
        path, folder = (root / key.replace("{split}", name) for key in (data_config.table, data_config.images))
        listing = Listing(path, name, folder, None, data_config)
        try:
            with damage_explained(path):
                rows, _ = read_rows(listing)
                usage.leave_out(why_unused(name, splits), count=sum(1 for _ in rows))
            usage.unit = listing.usage.unit
        except UserError as error:
            usage.notes.append(f"has split '{name}', which is not used and cannot be read: {error}")
    return usage


def _read_classes(path: Path, data_config: ConfigDict) -> Sequence[str]:
    if data_config.name in FORMATS and (read := FORMATS[data_config.name].read_classes):
        return read(path, data_config)
    return read_classes(path)


LABELING_TOOL = DataSource(
    lambda data_config, *which: open_own_images(FORMATS[data_config.name].read, data_config, *which), reads_classes=True
)
