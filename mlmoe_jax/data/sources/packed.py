"""A data set in a few large files (`--mode=pack`), with random access to each image.

    FOLDER/manifest.json                       # all files with sizes and sha256, classes, settings
    FOLDER/train.npz                           # labels i8[N,K], ids and groups, so that opening a split reads no image
    FOLDER/train-00000-of-00006.arrayrecord    # one encoded image per record
    FOLDER/train-00000-of-00006.arrayrecord.json    # its entry of the manifest, to resume packing

On an object store, a shard is copied to the local cache when one of its images is first needed, so that later epochs
read only the local disk. All processes of a machine share the copy. The cache needs space for the whole data set.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath
from filelock import FileLock

from mlmoe_jax.data.images import BadImage, EncodedImages
from mlmoe_jax.data.sources.source import DataSource, require_known_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import (
    MIB,
    MOST_TEXT,
    cache_folder,
    damage_explained,
    file_sha256,
    is_file_name,
    read_bytes,
)
from mlmoe_jax.runtime.formats import UNPACKED_BYTES, read_npz
from mlmoe_jax.runtime.progress import heartbeat
from mlmoe_jax.runtime.storage import atomic_file

MANIFEST = "manifest.json"

# Each open shard needs a file descriptor, often limited to 1,024 per process; opening a shard takes 0.15 ms.
OPEN_SHARDS = 256
STREAMS = 16  # concurrent requests to an object store
COPY_BYTES = 8 * MIB  # read at once from an object store


@dataclass(frozen=True)
class PackedFile:
    """A file of a packed data set as listed in the manifest.

    Attributes:
      records: the number of images; 0 for labels.
    """

    file: str
    bytes: int
    sha256: str
    records: int = 0

    @classmethod
    def from_entry(cls, entry: dict) -> PackedFile:
        """Read an entry of a manifest, which may come from elsewhere.

        Raises ValueError unless it names a file in the folder of the manifest, with a size and a sha256.
        """
        item = cls(entry["file"], entry["bytes"], entry["sha256"], entry.get("records", 0))
        sizes = isinstance(item.bytes, int) and isinstance(item.records, int) and 0 <= item.records <= item.bytes
        if not (sizes and is_file_name(item.file) and re.fullmatch("[0-9a-f]{64}", str(item.sha256))):
            raise ValueError(f"{entry} is not a file in its folder with a size and a sha256")
        return item


@dataclass(frozen=True)
class Manifest:
    """A packed data set.

    Attributes:
      splits: name -> the file of the labels, followed by the shards.
    """

    folder: epath.Path
    source: str
    classes: tuple[str, ...]
    splits: dict[str, list[PackedFile]]


def read_manifest(root: str | os.PathLike) -> Manifest:
    """Read the manifest in a folder; UserError if the folder is not a packed data set or is incomplete."""
    folder = epath.Path(root).expanduser()
    path = folder / MANIFEST
    with damage_explained(path):
        content = json.loads(read_bytes(path, MOST_TEXT))
        splits = {
            name: [PackedFile.from_entry(entry) for entry in (split["labels"], *split["shards"])]
            for name, split in content["splits"].items()
        }
        if not splits:
            raise UserError(f"{folder} is incomplete; repeat the --mode=pack command to finish it")
        return Manifest(folder, str(content["source"]), tuple(map(str, content["classes"])), splits)


def open_packed(root: str | os.PathLike, split: str) -> Split:
    """Open a split of a packed data set, with the ids, labels and classes of the original data set.

    Args:
      root: folder or gs:// address of the packed data set.
      split: name of the split.

    Raises:
      UserError: `root` is not a packed data set, the split is unknown, or its labels are damaged.
    """
    manifest = read_manifest(root)
    folder, classes = manifest.folder, manifest.classes
    require_known_split("packed", split, manifest.splits)
    table, *shards = manifest.splits[split]
    images = PackedImages(str(folder), shards, [])
    with damage_explained(folder / table.file):
        content = read_bytes(folder / table.file)
        if hashlib.sha256(content).hexdigest() != table.sha256:
            raise UserError(_changed(folder / table.file))
        # Labels are mostly zeros, so the file may be much smaller. Every image has at least a byte in a shard.
        stored = read_npz(io.BytesIO(content), usual=max(UNPACKED_BYTES, 2 * len(images) * len(classes)))
        keys = [key for key in ("ids", "groups") if key == "ids" or key in stored]
        images.ids, *groups = ([name.decode(errors="surrogatepass") for name in stored[key].tolist()] for key in keys)
        return Split(split, classes, stored["labels"].astype(np.int8), images.ids, images, *groups)


def verify(root: str | os.PathLike) -> Iterator[str]:
    """Compare every file with its sha256. Yield one sentence per damaged or missing file, and "" per intact file.

    On an object store, files are read from the store, not from the cache. Raises UserError if `root` is not a packed
    data set.
    """
    manifest = read_manifest(root)

    def problem(item: PackedFile) -> str:
        path = manifest.folder / item.file
        try:
            return "" if file_sha256(path) == item.sha256 else _changed(path)
        except FileNotFoundError:
            return f"{path} is missing; copy it again, or repeat the --mode=pack command"

    with ThreadPoolExecutor(STREAMS) as pool:
        yield from pool.map(problem, itertools.chain.from_iterable(manifest.splits.values()))


def _changed(path: epath.Path) -> str:
    return (
        f"{path} has changed since it was packed (its sha256 differs); copy it again, or delete it and repeat the "
        "--mode=pack command"
    )


# -------------------------------------------------------------------------------------------------------------- images
class PackedImages(EncodedImages):
    """The images of one split, in the order of `shards`. Errors name images by `ids`.

    A shard is opened when it is first needed, separately in each worker process.
    """

    def __init__(self, folder: str, shards: Sequence[PackedFile], ids: Sequence[str]):
        self.folder, self.shards, self.ids = folder, shards, ids
        self._ends = np.cumsum([shard.records for shard in shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def name(self, row: int) -> str:
        return f"{self.ids[row]} in {self.folder}/{self._locate(row)[0].file}"

    def encoded(self, row: int) -> bytes:
        shard, position = self._locate(row)
        try:
            return _reader(self.folder, shard).read([position])[0]
        except RuntimeError as error:  # raised by the C++ library, which checks a hash per record
            raise BadImage(
                f"cannot read {self.name(row)} as an image: the shard is damaged ({error}); --mode=data finds all "
                "damaged files"
            ) from error

    def _locate(self, row: int) -> tuple[PackedFile, int]:
        """Return the shard of image `row`, and the position of the image in it."""
        row = range(len(self))[row]
        number = int(np.searchsorted(self._ends, row, side="right"))
        shard = self.shards[number]
        return shard, int(row - self._ends[number] + shard.records)


@functools.lru_cache(maxsize=OPEN_SHARDS)  # the last user of a reader that is no longer in the cache closes it
def _reader(folder: str, shard: PackedFile) -> ArrayRecordReader:
    """Open a shard. Several threads can read from it concurrently."""
    path = _cached(folder, shard) if "://" in folder else f"{folder}/{shard.file}"
    # No read-ahead: images are read by position, mostly in random order.
    reader = ArrayRecordReader(path, "readahead_buffer_size:0", file_reader_buffer_size=1 << 15)
    if (records := reader.num_records()) != shard.records:  # 0 for a missing file
        raise UserError(
            f"{path} is missing or damaged: it has {records} images instead of {shard.records}; copy it again"
        )
    return reader


def _cached(folder: str, shard: PackedFile) -> str:
    """Return the path of the local copy of a shard. Copy and verify the shard if it is not in the cache.

    Many processes of a machine may need a shard at the same time; the first one copies it, and the others wait.
    """
    local = cache_folder() / "packed" / f"{shard.sha256}.arrayrecord"
    source = epath.Path(folder) / shard.file
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(local.with_suffix(".lock")):
            if not (local.is_file() and local.stat().st_size == shard.bytes):
                _fetch(source, local, shard)
    except OSError as error:
        raise UserError(
            f"cannot copy {source} to {local.parent}: {error.strerror or error}; the cache needs space for the whole "
            "data set, and MLMOE_CACHE sets its folder"
        ) from error
    return str(local)


def _fetch(source: epath.Path, local: Path, shard: PackedFile) -> None:
    """Copy a shard into the cache, with a heartbeat; UserError if the shard has changed."""
    digest = hashlib.sha256()
    with (
        atomic_file(epath.Path(local), alone=False) as partial,
        source.open("rb") as remote,
        open(partial, "wb") as copy,
    ):
        while piece := remote.read(COPY_BYTES):
            copy.write(piece)
            digest.update(piece)
            heartbeat()
        if digest.hexdigest() != shard.sha256:
            raise UserError(_changed(source))


PACKED_DATA = DataSource(
    lambda data_config, split, classes: open_packed(data_config.root, split),
    original=lambda data_config: read_manifest(data_config.root).source,
)
