"""How labels of one's own images are stored in a folder or at an address: the first layout of a list that is there.

photos/labels.csv            # a table
photos/metadata.csv          # or a table of `containers.metadata_tables`, which the readers of `tables` read
photos/train/metadata.csv    # or one per folder of a split
photos/train-000.parquet     # or Parquet files, or tar files
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from mlmoe_jax.data.containers.columns import find_image_column, find_label_column
from mlmoe_jax.data.containers.files_of_splits import find_suffix
from mlmoe_jax.data.containers.metadata_tables import METADATA, read_schema
from mlmoe_jax.data.containers.reach import Place, open_place
from mlmoe_jax.data.names import STANDARD_SPLITS, find_name, split_key
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.text import abbreviate

TABLE = "labels.csv"
_SOURCES = {".parquet": "parquet", ".tar": "webdataset"}  # by the suffix of files


def find_layout(root: str) -> dict[str, str]:
    """Return the keys of `config.data` with which the labels below a folder or at an address are read.

    The layouts are, in this order: the table labels.csv, tables of metadata, and Parquet or tar files. For a folder
    without any, the keys name the table. Raises UserError if an address has none of them, or cannot be reached.
    """
    is_local = "://" not in root
    if is_local and os.path.exists(os.path.join(os.path.expanduser(root), TABLE)):
        return {"table": TABLE}
    place = open_place(root)
    if metadata := _find_metadata(place):
        return metadata
    if suffix := find_suffix(place):
        return {"name": _SOURCES[suffix]}
    if is_local or TABLE in place.names:
        return {"table": TABLE}
    raise UserError(f"{root} has no {TABLE}, no metadata.csv, and no Parquet or tar files{place.hint}")


def _find_metadata(place: Place) -> dict[str, str]:
    """Return the keys of `config.data` that read the metadata tables of a place, with values; {} if it has none.

    `image_column` and `label_column` are among them if it is clear which ones are meant. Raises UserError if it is not
    clear which table is meant, or if it is damaged.
    """
    tables = [name for name in place.names if os.path.basename(name) in METADATA]
    if not tables:
        return {}
    folder, name = _join_splits(place, tables)
    path = f"{place.fetch(tables)}/{tables[0]}"
    schema = read_schema(path)
    layout = {"name": name.partition(".")[2], "table": os.path.join(folder, name), "images": folder}
    with contextlib.suppress(UserError):  # which the reader of the table raises, unless the user names a column
        layout["image_column"] = image = find_image_column(schema, "", path)
        label = find_label_column(schema, (image, find_name(schema.names, SPLIT_COLUMN)), path)
        if label or name.endswith(".csv"):  # in JSON, an object has a value per class
            layout["label_column"] = label
    return layout


def _join_splits(place: Place, tables: Sequence[str]) -> tuple[str, str]:
    """Return the folder and the name of the tables, with {split} in place of several splits.

    Raises UserError if there are several tables that are not in folders of splits.
    """
    folders, names = zip(*map(os.path.split, tables), strict=True)
    above, splits = zip(*map(os.path.split, folders), strict=True)
    if len(tables) == 1:
        return folders[0], names[0]
    if len({*above}) > 1 or len({*names}) > 1 or not all(split_key(split) in STANDARD_SPLITS for split in splits):
        raise UserError(
            f"{place.folder} has several tables of metadata: {abbreviate(tables)}; join them to one, or to one per "
            f"folder of a split, such as train/{names[0]}"
        )
    return os.path.join(above[0], "{split}"), names[0]
