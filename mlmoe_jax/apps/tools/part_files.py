"""The names of images in the files of parts: tables as Parquet, CSV or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from etils import epath

from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import unescape_cell


def plain(value: Any) -> Any:
    r"""Return a value as it is in Parquet, whose texts are UTF-8: other bytes of a path are escaped, as in \udcff."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def read_names(path: epath.Path) -> list[str]:
    """Return the names of the images in the file of a part, in `plain` text; UserError if it is damaged."""
    with damage_explained(path):
        return list(map(plain, _read_names(path)))


def _read_names(path: epath.Path) -> Iterator[str]:
    with path.open("rb") as file:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            yield from parquet.read_table(file, columns=["image"]).column(0).to_pylist()
            return
        lines = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        if path.suffix == ".csv":
            yield from (unescape_cell(row[0]) for row in islice(csv.reader(lines, strict=True), 1, None))
        else:
            decode = json.JSONDecoder().raw_decode
            yield from (decode(line, line.index(":") + 2)[0] for line in lines)
