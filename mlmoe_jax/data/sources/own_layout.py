"""How labels of one's own images are stored in a folder or at an address: the first layout of a list that is there."""

from __future__ import annotations

import os

from mlmoe_jax.data.containers.files_of_splits import find_suffix
from mlmoe_jax.data.containers.reach import open_place
from mlmoe_jax.data.sources.metadata import find_metadata
from mlmoe_jax.errors import UserError

TABLE = "labels.csv"
_SOURCES = {".parquet": "parquet", ".tar": "webdataset"}  # by the suffix of files


def find_layout(root: str) -> dict[str, str]:
    """Return the keys of `config.data` with which the labels below a folder or at an address are read.

    The layouts are, in this order: the table labels.csv, tables of metadata, and Parquet or tar files. For a folder
    without any, the keys are those of the table. Raises UserError if an address has none of them, or cannot be reached.
    """
    is_local = "://" not in root
    if is_local and os.path.exists(os.path.join(os.path.expanduser(root), TABLE)):
        return {"table": TABLE}
    place = open_place(root)
    if metadata := find_metadata(place):
        return metadata
    if suffix := find_suffix(place):
        return {"name": _SOURCES[suffix]}
    if is_local or TABLE in place.names:
        return {"table": TABLE}
    raise UserError(f"{root} has no {TABLE}, no metadata.csv, and no Parquet or tar files{place.hint}")
