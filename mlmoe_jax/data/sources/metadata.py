"""Tables metadata.csv and metadata.jsonl beside images, as the datasets library reads them (ImageFolder).

    photos/metadata.csv          # one table, with paths relative to its folder
    photos/train/metadata.csv    # or one per folder of a split

The column or key `file_name` has the path of an image, or if there is none, the only one whose name ends in _file_name.
The readers of `tables` read them.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlmoe_jax.data.containers.columns import find_label_column
from mlmoe_jax.data.containers.reach import Place
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.names import STANDARD_SPLITS, find_name, split_key
from mlmoe_jax.data.sources.catalog import LABEL_COLUMN
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN
from mlmoe_jax.data.sources.tables import CODE_OF_CELL, read_header, whole_rows
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained, open_text
from mlmoe_jax.runtime.text import abbreviate

_SOURCES = {"metadata.csv": "csv", "metadata.jsonl": "jsonl"}  # by the name of the table
_IMAGE = "file_name"


def find_metadata(place: Place) -> dict[str, str]:
    """Return the keys of `config.data` that read the metadata tables of a place, with values; {} if it has none.

    `image_column` and `label_column` are among them if it is clear which ones are meant. Raises UserError if it is not
    clear which table is meant, or if it is damaged.
    """
    tables = [name for name in place.names if os.path.basename(name) in _SOURCES]
    if not tables:
        return {}
    folder, name = _join_splits(place, tables)
    path = f"{place.fetch(tables)}/{tables[0]}"
    record = next(_read_records(path), {})
    layout = {"name": _SOURCES[name], "table": os.path.join(folder, name), "images": folder}
    with contextlib.suppress(UserError):  # which the reader of the table raises, unless the user names a column
        layout["image_column"] = image = _find_image_key(record, path)
        others = {image, find_name(record, SPLIT_COLUMN) or ""}
        label = find_name(record, LABEL_COLUMN) or find_label_column(_schema_of(record), others, path)
        if label or name.endswith(".csv"):  # in JSON, an object has a value per class
            layout["label_column"] = label
    return layout


def is_metadata(path: PathLike) -> bool:
    """Return whether a path has the name of a metadata table."""
    return os.path.basename(path) in _SOURCES


def open_metadata(path: str, column: str = "") -> ImageFiles:
    """Return the images that a metadata table lists in a column; "" finds the column. UserError if it is damaged."""
    records = list(_read_records(path))
    key = _find_image_key(records[0] if records else {}, path, column)
    with damage_explained(path):
        return ImageFiles(os.path.dirname(path) or ".", [os.fspath(record[key]) for record in records])


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


def _find_image_key(record: Mapping[str, Any], path: PathLike, column: str = "") -> str:
    keys = [key for key in record if key.endswith(f"_{_IMAGE}")]
    if found := find_name(record, column or _IMAGE):
        return found
    if column or len(keys) != 1:
        missing = f"columns of images: {abbreviate(keys)}" if keys and not column else f"no column {column or _IMAGE}"
        raise UserError(f"{path} has {missing} (columns: {abbreviate(list(record))}); name it with --column")
    return keys[0]


def _read_records(path: PathLike) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, column -> cell; UserError if it is damaged."""
    with damage_explained(path), open_text(path) as file:
        if os.fspath(path).endswith(".csv"):
            reader = csv.reader(file, skipinitialspace=True)
            header = read_header(reader, path)
            yield from (dict(zip(header, cells, strict=True)) for _, cells in whole_rows(reader, header, path))
        else:
            yield from (dict(json.loads(line)) for line in file if line.strip())


def _schema_of(record: Mapping[str, Any]) -> Any:
    """Return the schema of a Parquet file with such a row. 0 and 1 are booleans."""
    import pyarrow as pa  # here, because --help does without it

    kinds = {key: pa.bool_() if f"{cell}" in CODE_OF_CELL else pa.scalar(cell).type for key, cell in record.items()}
    return pa.schema(kinds)
