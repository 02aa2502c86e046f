"""The images of Parquet files: a row per image, with a column of bytes or paths of image files.

Parquet stores rows in groups, of which only whole parts can be read. Rows that are read in order are read once: a part
of a group is decoded, and kept until other parts replace it. Rows that are read at random, as in training, would need
many parts for a few images. Their groups are therefore copied to the cache folder, uncompressed, once for all processes
of the machine. There, every image is read by its position.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from etils import epath
from filelock import FileLock

from mlmoe_jax.data.containers.columns import find_image_column
from mlmoe_jax.data.containers.reach import open_source, version_of
from mlmoe_jax.data.decoding import BadImage, read_file
from mlmoe_jax.data.images import EncodedImages
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MIB, cache_folder, damage_explained, disk_errors_explained, find_file
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import atomic_file

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

PART_BYTES = 8 * MIB  # of a group, decoded at once
KEPT_BYTES = 128 * MIB  # of decoded parts, in each process
WASTE = 4  # rows that are decoded per row that is used; above, groups are copied
SMALL = 4096  # decoded rows that are no waste yet


class Part(NamedTuple):
    """Consecutive rows of a group that are decoded together. `file`, `group` and `number` count from 0."""

    file: int
    group: int
    number: int


@dataclass(eq=False)
class ParquetImages(EncodedImages):
    """The images of Parquet files, in their order.

    Attributes:
      folder: a path or an address. `names` are the files below it. Names of images begin with `title` instead, the
        address from which the files were downloaded.
      columns: the name of the column of images in each file.
      ends: i64[g] of all g groups, the number of rows up to the end of each.
      first_groups: i64[files], the number of groups before each file.
      part_rows: i64[g], the number of rows in each part of a group.
    """

    folder: str
    title: str
    names: Sequence[str]
    columns: Sequence[str]
    ends: np.ndarray
    first_groups: np.ndarray
    part_rows: np.ndarray

    def __post_init__(self):
        self._reader = _Reader(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reader=_Reader(self))

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def path(self, file: int) -> str:
        return f"{self.folder}/{self.names[file]}"

    def name(self, row: int) -> str:
        """Return FILE#ROW, where rows of a file count from 0."""
        file, _, _ = self._locate(row)
        return f"{self.title}/{self.names[file]}#{row - self._start(int(self.first_groups[file]))}"

    def find_rows(self, names: Sequence[str]) -> np.ndarray:
        """Return the rows i64[n] of images with names such as `name`, but without the folder."""
        starts = {name: self._start(int(group)) for name, group in zip(self.names, self.first_groups, strict=True)}
        places = (name.rpartition("#") for name in names)
        return np.array([starts[file] + int(row) for file, _, row in places], np.int64)

    def encoded(self, row: int) -> bytes:
        cell = self._cell(row)
        return cell if isinstance(cell, bytes) else read_file(cell)

    def _cell(self, row: int) -> bytes | str:
        """Return the bytes of image `row`, or its path; BadImage if there is none, or the file is damaged."""
        file, group, position = self._locate(row)
        rows = int(self.part_rows[self.first_groups[file] + group])
        part = Part(file, group, position // rows)
        try:
            cell = self._reader.read(part, position % rows)
        except UserError as error:
            raise BadImage(f"cannot read {self.name(row)} as an image: {error}") from error
        if isinstance(cell, dict):  # as the datasets library stores images
            cell = cell["path"] if cell["bytes"] is None else cell["bytes"]
        if not cell:
            raise BadImage(f"{self.name(row)} has no image")
        return cell if isinstance(cell, bytes) else self._resolve(cell, file)

    def _resolve(self, path: str, file: int) -> str:
        """Return the path of an image, which is relative to the folder of its Parquet file, or to `folder`."""
        if path.startswith("/") or "://" in path:
            return path
        beside = f"{self.path(file).rpartition('/')[0]}/{path}"
        return beside if os.path.lexists(find_file(beside)) else f"{self.folder}/{path}"

    def _start(self, group: int) -> int:
        return int(self.ends[group - 1]) if group else 0

    def _locate(self, row: int) -> tuple[int, int, int]:
        """Return the file and its group that contain image `row`, and the index of the image in the group."""
        row = range(len(self))[row]
        group = int(np.searchsorted(self.ends, row, side="right"))
        file = int(np.searchsorted(self.first_groups, group, side="right")) - 1
        while self.first_groups[file] > group:
            file -= 1
        return file, group - int(self.first_groups[file]), row - self._start(group)


def open_parquet(
    folder: str, names: Sequence[str], usage: Usage, column: str = "", *, title: str = ""
) -> ParquetImages:
    """Return the images of Parquet files below `folder`, see `ParquetImages`. Only the ends of the files are read.

    `column` is the column of images, "" finds it. Raises UserError if a file is damaged or has no such column.
    """
    columns, ends, counts, part_rows = [], [], [], []
    for name in names:
        path = f"{folder}/{name}"
        with open_file(path) as file:
            columns.append(find_image_column(file.schema_arrow, column, path))
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
        counts.append(len(groups))
        ends += [group.num_rows for group in groups]
        part_rows += [_rows_of_part(group, columns[-1]) for group in groups]
    usage.unit = "row"
    first_groups = np.cumsum([0, *counts[:-1]])
    rows = np.cumsum(ends, dtype=np.int64), first_groups, np.array(part_rows, np.int64)
    return ParquetImages(folder, title or folder, names, columns, *rows)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[ParquetFile]:
    """Return a context with the Parquet file at a path or an address; UserError if it is damaged."""
    from pyarrow.parquet import ParquetFile  # here, because --help does without it

    with contextlib.ExitStack() as opened:
        with damage_explained(path):
            source = opened.enter_context(open_source(path))
            file = opened.enter_context(ParquetFile(source, page_checksum_verification=True))
        yield file


def _rows_of_part(group: Any, column: str) -> int:
    chunks = (group.column(k) for k in range(group.num_columns))
    size = sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}."))
    return max(1, min(group.num_rows, group.num_rows * PART_BYTES // max(1, size)))


# --------------------------------------------------------------------------------------------------------------- reader
@dataclass(eq=False)
class _Reader:
    """Reads cells of the files of `images`, in this process. Threads may share it.

    Attributes:
      parts: the parts that were used last.
      stream: the part that follows in the group that is being read, and the iterator over this group.
      decoded: the number of rows that were decoded, and `used` those that were asked for.
    """

    images: ParquetImages
    parts: OrderedDict[Part, pa.Array] = field(default_factory=OrderedDict)
    stream: tuple[Part, Iterator[pa.Array]] | None = None
    decoded: int = 0
    used: int = 0
    kept: int = 0
    copies: OrderedDict[tuple[int, int], Any] = field(default_factory=OrderedDict)
    lock: Any = field(default_factory=threading.Lock)

    def read(self, part: Part, position: int) -> Any:
        """Return the cell at a position of a part: bytes, a path, a dict of both, or None; UserError if damaged."""
        with self.lock, damage_explained(self.images.path(part.file)):
            self.used += 1
            if part not in self.parts:
                if part[:2] in self.copies or self.decoded > SMALL + WASTE * self.used:
                    return self._copied(part)[position].as_py()
                self._decode(part)
            self.parts.move_to_end(part)
            return self.parts[part][position].as_py()

    def _decode(self, part: Part) -> None:
        """Decode the parts of the group up to `part`."""
        if self.stream is None or self.stream[0][:2] != part[:2] or self.stream[0].number > part.number:
            self.stream = Part(part.file, part.group, 0), self._group(part)
        following, values = self.stream
        while following.number <= part.number:
            self.parts[following] = array = next(values)
            self.decoded += len(array)
            self.kept += array.nbytes
            following = following._replace(number=following.number + 1)
            self.stream = following, values
        while self.kept > KEPT_BYTES and len(self.parts) > 1:
            self.kept -= self.parts.popitem(last=False)[1].nbytes

    def _group(self, part: Part) -> Iterator[pa.Array]:
        """Yield the parts of the group of `part`, in order."""
        images = self.images
        rows = int(images.part_rows[images.first_groups[part.file] + part.group])
        column = images.columns[part.file]
        with open_file(images.path(part.file)) as file:
            batches = file.iter_batches(rows, row_groups=[part.group], columns=[column], use_threads=False)
            for batch in batches:
                array = batch.column(0)
                yield array.dictionary_decode() if hasattr(array, "dictionary_decode") else array

    def _copied(self, part: Part) -> pa.Array:
        """Return a part from the copy of its group in the cache folder, which is made if it is not there."""
        import pyarrow as pa

        key = part.file, part.group
        if key not in self.copies:
            self.copies[key] = pa.ipc.open_file(pa.memory_map(self._copy(part)))
        self.copies.move_to_end(key)
        return self.copies[key].get_batch(part.number).column(0)

    def _copy(self, part: Part) -> str:
        path = self.images.path(part.file)
        version = f"{version_of(path)} {self.images.columns[part.file]} {part.group} {PART_BYTES}"
        copy = cache_folder() / "parquet" / f"{hashlib.sha256(version.encode()).hexdigest()}.arrow"
        with disk_errors_explained(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(copy.with_suffix(".lock")):
                if not copy.is_file():
                    self._write(part, copy)
        return str(copy)

    def _write(self, part: Part, copy: Any) -> None:
        import pyarrow as pa

        if not self.copies:
            status(f"copying {self.images.folder} to {copy.parent} to read its rows in random order")
        with atomic_file(epath.Path(copy)) as partial:
            arrays = self._group(part)
            first = next(arrays)
            schema = pa.schema([("image", first.type)])
            with pa.ipc.new_file(str(partial), schema) as writer:
                for array in (first, *arrays):
                    writer.write_batch(pa.record_batch([array], schema))
