"""A data set in a few large files (`mlmoe pack`), with random access to each image.

    FOLDER/manifest.json                                    # settings, classes, and all files with sizes and sha256
    FOLDER/train.npz                                        # labels i8[N,K], ids and groups
    FOLDER/train-00000-0123456789abcdef.arrayrecord         # one encoded image per record
    FOLDER/train-00000-0123456789abcdef.arrayrecord.json    # what `mlmoe pack` found, to resume

Opening a split reads no image. The name of a shard has a digest of its content, so a shard never changes.
The manifest is written last.

On an object store, a shard is copied to the local cache when one of its images is first needed, so that later epochs
read only the local disk. All processes of a machine share the copy. The cache needs space for the whole data set.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath

from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.images import EncodedImages, InParts
from mlmoe_jax.data.sources.source import DataSource, require_known_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import (
    MIB,
    MOST_TEXT,
    PathLike,
    cache_folder,
    damage_explained,
    file_sha256,
    is_file_name,
    read_bytes,
)
from mlmoe_jax.runtime.formats import UNPACKED_BYTES, read_npz
from mlmoe_jax.runtime.progress import heartbeat
from mlmoe_jax.runtime.storage import cached_file

MANIFEST = "manifest.json"
SOURCE = "data.name"  # the setting with the name of the data set that was packed

# Each open shard needs a file descriptor, often limited to 1,024 per process; opening a shard takes 0.15 ms.
OPEN_SHARDS = 256
STREAMS = 16  # concurrent requests to an object store
COPY_BYTES = 8 * MIB  # read at once from an object store


@dataclass(frozen=True)
class PackedFile:
    """A file of a packed data set, as the manifest lists it.

    `records` is the number of images in it; 0 for the file with the labels.
    """

    file: str
    bytes: int
    sha256: str
    records: int = 0

    @classmethod
    def from_entry(cls, entry: dict) -> PackedFile:
        """Return the file of an entry of a manifest, which may be untrusted.

        Raises ValueError unless the entry has a size, a sha256, and the name of a file in the folder of the manifest.
        """
        item = cls(entry["file"], entry["bytes"], entry["sha256"], entry.get("records", 0))
        sizes = isinstance(item.bytes, int) and isinstance(item.records, int) and 0 <= item.records <= item.bytes
        if not (sizes and is_file_name(item.file) and re.fullmatch("[0-9a-f]{64}", str(item.sha256))):
            raise ValueError(f"{entry} is not a file in its folder with a size and a sha256")
        return item


@dataclass(frozen=True)
class Manifest:
    """The manifest of a packed data set.

    Attributes:
      source: name of the data set that was packed.
      splits: name of a split -> its files: first the file with the labels, then the shards.
      classes: name of a split -> the names of its classes.
    """

    folder: epath.Path
    source: str
    splits: dict[str, list[PackedFile]]
    classes: dict[str, tuple[str, ...]]


def read_manifest(root: PathLike) -> Manifest:
    """Read the manifest in a folder; UserError if it is not a packed data set or is incomplete."""
    folder = epath.Path(root).expanduser()
    path = folder / MANIFEST
    with damage_explained(path):
        try:
            content = json.loads(read_bytes(path, MOST_TEXT))
        except FileNotFoundError as error:
            raise UserError(f"cannot read {path}: there is none; if mlmoe pack has not finished, repeat it") from error
        files = {
            name: [PackedFile.from_entry(entry) for entry in (split["labels"], *split["shards"])]
            for name, split in content["splits"].items()
        }
        classes = {name: tuple(map(str, split["classes"])) for name, split in content["splits"].items()}
        return Manifest(folder, str(content["settings"][SOURCE]), files, classes)


def open_packed(root: PathLike, split: str) -> Split:
    """Open a split of a packed data set. Its ids, labels and classes are equal to the original data set.

    `root` is a local folder, or an address such as gs://. Raises UserError if it is not a packed data set, the split is
    unknown, or the labels are damaged.
    """
    manifest = read_manifest(root)
    require_known_split("packed", split, manifest.splits)
    classes, (table, *shards) = manifest.classes[split], manifest.splits[split]
    images, path = PackedImages(str(manifest.folder), shards, []), manifest.folder / table.file
    with damage_explained(path):
        content = read_bytes(path)
        if hashlib.sha256(content).hexdigest() != table.sha256:
            raise UserError(_changed(path))
        # Labels are mostly zeros, so the file may be much smaller. Every image has at least a byte in a shard.
        stored = read_npz(io.BytesIO(content), usual=max(UNPACKED_BYTES, 2 * len(images) * len(classes)))
        labels = stored.pop("labels").astype(np.int8)
        names = {key: texts.tobytes().decode(errors="surrogatepass").split("\0") for key, texts in stored.items()}
        images.ids = names["ids"]
        return Split(split, classes, labels, images=images, **names)


def verify(root: PathLike) -> Iterator[str]:
    """Compare every file of a packed data set with its sha256 in the manifest.

    For each file, yield a sentence if it is damaged or missing, and "" if it is intact. On an object store, files are
    read from the store, not from the cache. Raises UserError if `root` is not a packed data set.
    """
    manifest = read_manifest(root)

    def problem(item: PackedFile) -> str:
        path = manifest.folder / item.file
        try:
            return "" if file_sha256(path) == item.sha256 else _changed(path)
        except FileNotFoundError:
            return f"{path} is missing; copy it again, or repeat mlmoe pack"

    with ThreadPoolExecutor(STREAMS) as pool:
        yield from pool.map(problem, itertools.chain.from_iterable(manifest.splits.values()))


def _changed(path: epath.Path) -> str:
    return (
        f"{path} has changed since it was packed (its sha256 differs); copy it again, or delete it and repeat the "
        "mlmoe pack command"
    )


# -------------------------------------------------------------------------------------------------------------- images
class PackedImages(InParts, EncodedImages):
    """The images of one split of a packed data set, in the order of the shards.

    A shard is opened when one of its images is first read, in each worker process separately. Errors name an image by
    its id.
    """

    def __init__(self, folder: str, shards: Sequence[PackedFile], ids: Sequence[str]):
        self.folder, self.shards, self.ids = folder, shards, ids
        self.ends = np.cumsum([shard.records for shard in shards])

    def name(self, row: int) -> str:
        return f"{self.ids[row]} in {self.folder}/{self._find(row)[0].file}"

    def encoded(self, row: int) -> bytes:
        shard, position = self._find(row)
        try:
            return _reader(self.folder, shard).read([position])[0]
        except RuntimeError as error:  # raised by the C++ library, which checks a hash per record
            raise BadImage(
                f"cannot read {self.name(row)} as an image: the shard is damaged ({error}); mlmoe data finds all "
                "damaged files"
            ) from error

    def stamp(self, row: int) -> str:
        shard, position = self._find(row)
        return f"{shard.sha256} {position}"

    def _find(self, row: int) -> tuple[PackedFile, int]:
        """Return the shard that contains image `row`, and the index of the image in the shard."""
        number, position = self.locate(row)
        return self.shards[number], position


@functools.lru_cache(maxsize=OPEN_SHARDS)  # the last user of a reader that is no longer in the cache closes it
def _reader(folder: str, shard: PackedFile) -> ArrayRecordReader:
    """Return a reader of a shard. Several threads can use it concurrently."""
    path = _cached(folder, shard) if "://" in folder else f"{folder}/{shard.file}"
    # No read-ahead: images are read by position, mostly in random order.
    reader = ArrayRecordReader(path, "readahead_buffer_size:0", file_reader_buffer_size=1 << 15)
    if (records := reader.num_records()) != shard.records:  # 0 for a missing file
        raise UserError(
            f"{path} is missing or damaged: it has {records} images instead of {shard.records}; copy it again"
        )
    return reader


def _cached(folder: str, shard: PackedFile) -> str:
    """Return the path of the local copy of a shard, which is copied into the cache and verified if it is not there."""
    local = cache_folder() / "packed" / f"{shard.sha256}.arrayrecord"
    return cached_file(local, functools.partial(_fetch, epath.Path(folder) / shard.file, shard))


def _fetch(source: epath.Path, shard: PackedFile, partial: Path) -> None:
    """Copy a shard, and call `heartbeat` meanwhile; UserError if it differs from the manifest or cannot be read."""
    digest = hashlib.sha256()
    with open(partial, "wb") as copy:
        for piece in _read_pieces(source):
            copy.write(piece)
            digest.update(piece)
            heartbeat()
    if digest.hexdigest() != shard.sha256:
        raise UserError(_changed(source))


def _read_pieces(source: epath.Path) -> Iterator[bytes]:
    with damage_explained(source), source.open("rb") as remote:
        yield from iter(functools.partial(remote.read, COPY_BYTES), b"")


PACKED_DATA = DataSource(
    lambda data_config, split: open_packed(data_config.root, split),
    original=lambda data_config: read_manifest(data_config.root).source,
)
