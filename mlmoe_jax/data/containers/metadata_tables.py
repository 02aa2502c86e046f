"""Tables metadata.csv and metadata.jsonl beside images, as the datasets library reads them (ImageFolder).

The column or key `file_name` has the path of an image, relative to the folder of the table. If there is none, it is the
only column whose name ends in _file_name.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlmoe_jax.data.containers.columns import find_image_column, infer_schema
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import CODE_OF_CELL
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained, open_text
from mlmoe_jax.runtime.formats import read_object

if TYPE_CHECKING:
    import pyarrow as pa

METADATA = ("metadata.csv", "metadata.jsonl")
_EXAMINED = 1000  # rows of a table, whose cells tell which columns have the images and labels


def open_metadata(path: str, column: str = "") -> ImageFiles:
    """Return the images that a metadata table lists in a column; "" finds the column. UserError if it is damaged."""
    key = find_image_column(read_schema(path), column, path)
    with damage_explained(path):
        return ImageFiles(os.path.dirname(path) or ".", [os.fspath(record[key]) for record in read_records(path)])


def read_schema(path: PathLike) -> pa.Schema:
    """Return the columns of a metadata table, by its first rows. Columns with only codes, such as 1, are booleans.

    Raises UserError if the table is damaged or in an object store.
    """
    import pyarrow as pa  # here, because --help does without it

    if "://" in os.fspath(path):
        raise UserError(f"{path} is in an object store, where only Parquet and tar files are read; copy it to a folder")
    records = list(itertools.islice(read_records(path), _EXAMINED))
    others = {key for record in records for key, cell in record.items() if f"{cell}" not in CODE_OF_CELL}
    return infer_schema(records, {key: pa.bool_() for record in records for key in record if key not in others})


def read_records(path: PathLike) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metadata table, column -> cell; UserError if it is damaged."""
    with damage_explained(path), open_text(path) as file:
        if os.fspath(path).endswith(".csv"):
            yield from csv.DictReader(file, restkey="", restval="", skipinitialspace=True)
        else:
            for line, text in enumerate(file, 1):
                if text.strip():
                    with damage_explained(f"{path} line {line}"):
                        record = read_object(text)
                    yield record
