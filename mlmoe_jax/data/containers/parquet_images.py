"""The images of Parquet files: a row per image, with a column of bytes or paths of image files.

Parquet stores rows in groups, which are compressed and can only be read whole. When an image of a group is first
needed, the column of this group is therefore copied to the cache folder, uncompressed, once for all threads and
processes of the machine. There, every image is read by its position, in any order, and takes no memory. When little of
the disk is free, copies that were not used for long are removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlmoe_jax.data.containers.columns import TEXT, find_columns, find_image_column
from mlmoe_jax.data.containers.reach import open_source, version_of
from mlmoe_jax.data.containers.stored import StoredImages, cache_batches
from mlmoe_jax.data.decoding import BadImage, read_file
from mlmoe_jax.data.images import stamp_file
from mlmoe_jax.runtime.files import MIB, cache_folder, damage_explained, find_file

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

KIND = "parquet"  # folder of the copies in the cache folder
_OPTIONS = {"pre_buffer": False, "buffer_size": MIB, "page_checksum_verification": True}  # a few pages in memory
ROWS_AT_ONCE = 64  # images in memory while a group is copied
FREE = 0.1  # of the disk, below which copies are removed
IN_USE = 60.0  # seconds since a copy was opened, in which it is not removed
OPEN_COPIES = 256  # each needs a file descriptor, often limited to 1,024 per process


@dataclass(eq=False)
class ParquetImages(StoredImages):
    """The images of Parquet files, in their order. The parts are the groups of the files.

    Attributes:
      columns: the name of the column of images in each file.
      groups: i64[g,3], the file of each group, the number of the group in this file, and of its first row.
      may_be_paths: bool[g], whether cells of each group may be paths of images.
      digests: a hash of the metadata of each file, which has the sizes of its columns and groups.
    """

    columns: Sequence[str]
    groups: np.ndarray
    may_be_paths: np.ndarray
    digests: Sequence[str]

    def name(self, row: int) -> str:
        """Return FILE#ROW, where rows of a file count from 0."""
        part, position = self.locate(row)
        file, _, first = self.groups[part]
        return f"{self.title}/{self.names[file]}#{first + position}"

    def identities(self) -> Iterator[str]:
        for (file, _, first), count in zip(self.groups.tolist(), np.diff(self.ends, prepend=0).tolist(), strict=True):
            for row in range(first, first + count):
                yield f"{self.title}/{self.names[file]}#{row} {self.columns[file]} {self.digests[file]}"

    def find_rows(self, names: Sequence[str]) -> np.ndarray:
        """Return the rows i64[n] of images with names such as `name`, but without the folder."""
        first_groups = np.searchsorted(self.groups[:, 0], np.arange(len(self.names)))
        starts = dict(zip(self.names, np.insert(self.ends, 0, 0)[first_groups], strict=True))
        places = (name.rpartition("#") for name in names)
        return np.array([starts[file] + int(row) for file, _, row in places], np.int64)

    def read_stored(self, part: int, position: int) -> bytes:
        """Return image `position` of a group."""
        cell = self._read_cell(part, position)
        if not cell:
            file, _, first = self.groups[part]
            raise BadImage(f"{self.title}/{self.names[file]}#{first + position} has no image")
        return cell if isinstance(cell, bytes) else read_file(cell)

    def stamp(self, row: int) -> str:
        part, position = self.locate(row)
        file, _, first = self.groups[part]
        cell = None
        if self.may_be_paths[part]:
            try:
                with self.reading(row):
                    cell = self._read_cell(part, position)
            except BadImage:
                return "missing"
        return stamp_file(cell) if isinstance(cell, str) else f"{self.versions[file]} {first + position}"

    def _read_cell(self, part: int, position: int) -> bytes | str | None:
        """Return image `position` of a group, or its path."""
        file, group, _ = self.groups[part].tolist()
        name = self.names[file]
        copy = _open_copy(f"{self.folder}/{name}", self.versions[file], self.columns[file], group)
        cell = copy.get_batch(position // ROWS_AT_ONCE).column(0)[position % ROWS_AT_ONCE].as_py()
        if isinstance(cell, dict):  # as the datasets library stores images
            cell = cell["path"] if cell["bytes"] is None else cell["bytes"]
        return self._resolve(cell, name) if cell and isinstance(cell, str) else cell

    def _resolve(self, path: str, name: str) -> str:
        """Return the path of an image, which is relative to the folder of its Parquet file `name`, or to `folder`."""
        if path.startswith("/") or "://" in path:
            return path
        beside = os.path.join(self.folder, os.path.dirname(name), path)
        return beside if os.path.lexists(find_file(beside)) else f"{self.folder}/{path}"


def open_parquet(folder: str, names: Sequence[str], title: str, column: str = "") -> ParquetImages:
    """Return the images of Parquet files below `folder`, see `ParquetImages`. Only the ends of the files are read.

    `column` is the column of images, see `find_image_column`. Raises UserError if a file is damaged or has none.
    """
    versions, digests, columns, sizes, groups, may_be_paths = [], [], [], [], [], []
    for number, name in enumerate(names):
        path = f"{folder}/{name}"
        versions.append(version_of(path))
        with open_file(path) as file:
            digests.append(hashlib.sha256(pickle.dumps(file.metadata)).hexdigest())
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            columns.append(find_image_column(file.schema_arrow, column, path) if any(counts) else "")
            may_be_paths += _find_paths(file, columns[-1])
        sizes += counts
        groups += [(number, group, first) for group, first in enumerate(np.cumsum([0, *counts[:-1]])) if counts]
    ends, places = np.cumsum(sizes, dtype=np.int64), np.array(groups, np.int64).reshape(-1, 3)
    paths = np.array(may_be_paths, bool)
    return ParquetImages(folder, names, title, versions, ends, columns, places, paths, digests)


def _find_paths(file: ParquetFile, column: str) -> list[bool]:
    """Return which groups may have paths of images in a column, by its type and its numbers of nulls."""
    groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
    leaves = [file.schema.column(leaf).path for leaf in range(len(file.schema))]
    if f"{column}.bytes" not in leaves:
        return [column in find_columns(file.schema_arrow, TEXT) for _ in groups]
    counts = (group.column(leaves.index(f"{column}.bytes")).statistics for group in groups)
    return [not (count and count.has_null_count and count.null_count == 0) for count in counts]


@contextlib.contextmanager
def open_file(path: str) -> Iterator[ParquetFile]:
    """Return a context with the Parquet file at a path or an address; UserError if it is damaged."""
    from pyarrow.parquet import ParquetFile  # here, because --help does without it

    with contextlib.ExitStack() as opened:
        with damage_explained(path):
            source = opened.enter_context(open_source(path))
            file = opened.enter_context(ParquetFile(source, **_OPTIONS))
        yield file


# --------------------------------------------------------------------------------------------------------------- copies
@functools.lru_cache(OPEN_COPIES)
def _open_copy(path: str, version: str, column: str, group: int) -> pa.RecordBatchFileReader:
    """Return the copy of a column of a group, which is made if it is not in the cache folder."""
    import pyarrow as pa

    read = functools.partial(_read_group, path, column, group)
    copy = cache_batches(path, version, KIND, f"{column} {ROWS_AT_ONCE}", f"-{group}", read)
    return pa.ipc.open_file(pa.memory_map(copy))


def _read_group(path: str, column: str, group: int) -> Iterator[pa.RecordBatch]:
    _remove_copies(cache_folder() / KIND)
    rows = 0
    with damage_explained(path), open_file(path) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[column], use_threads=False):
            if rows % ROWS_AT_ONCE:  # the position of a row would be another
                raise ValueError(f"group {group} cannot be read in parts of {ROWS_AT_ONCE} rows")
            yield batch
            rows += len(batch)


def _remove_copies(folder: Path) -> None:
    """Remove the older half of the copies if little of the disk is free, except those that may be about to be read."""
    disk = shutil.disk_usage(folder)
    if disk.free >= FREE * disk.total:
        return
    ages = sorted((time.time() - copy.stat().st_mtime, copy) for copy in folder.glob("*.arrow"))
    for age, copy in ages[len(ages) // 2 :]:
        if age > IN_USE:
            copy.unlink(missing_ok=True)
