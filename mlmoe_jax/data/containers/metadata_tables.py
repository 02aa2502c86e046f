"""Tables metadata.csv and metadata.jsonl beside images, as the datasets library reads them (ImageFolder).

The column or key `file_name` has the path of an image, relative to the folder of the table. If there is none, it is the
only column whose name ends in _file_name.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from typing import Any

from mlmoe_jax.data.containers.columns import find_image_column, infer_schema
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.runtime.files import PathLike, damage_explained, open_text

METADATA = ("metadata.csv", "metadata.jsonl")


def open_metadata(path: str, column: str = "") -> ImageFiles:
    """Return the images that a metadata table lists in a column; "" finds the column. UserError if it is damaged."""
    records = list(read_records(path))
    key = find_image_column(infer_schema(records, {}), column, path)
    with damage_explained(path):
        return ImageFiles(os.path.dirname(path) or ".", [os.fspath(record[key]) for record in records])


def read_records(path: PathLike) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metadata table, column -> cell; UserError if it is damaged."""
    with damage_explained(path), open_text(path) as file:
        if os.fspath(path).endswith(".csv"):
            yield from csv.DictReader(file, restkey="", restval="", skipinitialspace=True)
        else:
            for line, text in enumerate(file, 1):
                if text.strip():
                    with damage_explained(f"{path} line {line}"):
                        record = dict(json.loads(text))
                    yield record
