"""A data set that `--mode=pack` has packed into a few large files, with random access to each image.

    FOLDER/manifest.json                       # all files with sizes and sha256, classes, settings
    FOLDER/train.npz                           # labels i8[N,K] and ids (UTF-8), so that no images are read to open it
    FOLDER/train-00000-of-00006.arrayrecord    # one encoded image per record

On an object store, a shard is copied to the local cache when one of its images is first needed, so that later epochs
only read local disk. The cache needs space for the whole data set.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath

from mlmoe_jax.data.images import BadImage, EncodedImages
from mlmoe_jax.data.sources.source import Source
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_DATA, cache_folder, damage_explained, is_file_name, read_bytes
from mlmoe_jax.runtime.formats import USUAL, read_npz
from mlmoe_jax.runtime.storage import Folder

MANIFEST, UNFINISHED, FORMAT = "manifest.json", "unfinished.json", 1

# Each open shard needs a file descriptor, often limited to 1,024 per process; opening a shard takes 0.15 ms.
OPEN_SHARDS = 256
STREAMS = 16  # concurrent requests to an object store


@dataclass(frozen=True)
class PackedFile:
    """A file of a packed data set as listed in the manifest; records: its number of images, 0 for labels."""

    file: str
    bytes: int
    sha256: str
    records: int = 0

    @classmethod
    def of(cls, entry: dict, manifest: epath.Path) -> PackedFile:
        """Read an entry of the file `manifest`; UserError if it does not name a file in the same folder or a sha256."""
        file = entry.get("file")
        if not is_file_name(file):
            raise UserError(f"{manifest} names the file {file!r}, which is not in its folder; pack the data set again")
        if not re.fullmatch("[0-9a-f]{64}", str(entry.get("sha256"))):
            raise UserError(f"{manifest} has no sha256 of 64 hex digits for {file}; pack the data set again")
        size, records = entry["bytes"], entry.get("records", 0)
        if not (isinstance(size, int) and isinstance(records, int) and 0 <= records <= size):
            raise UserError(f"{manifest} gives {file} {size!r} bytes and {records!r} images; pack the data set again")
        return cls(file, size, entry["sha256"], records)


def open_packed(root: str | os.PathLike, split: str) -> Split:
    """Open a split of the folder, or gs:// address, `root`, with the ids, labels and classes of the original data set.

    Raises UserError if `root` is not a packed data set, for an unknown split, and for files that are missing or have
    another size.
    """
    folder, manifest = read_manifest(root)
    if split not in manifest["splits"]:
        raise UserError(f"data set packed has no split '{split}'; it has {', '.join(manifest['splits'])}")
    table, *shards = _files_of(folder, manifest, split)
    if wrong := next(_sizes(folder, [table, *shards]), ""):
        raise UserError(wrong)
    images, classes = PackedImages(str(folder), shards, []), tuple(manifest["classes"])
    with damage_explained(folder / table.file):
        content = read_bytes(folder / table.file, MOST_DATA)
        if hashlib.sha256(content).hexdigest() != table.sha256:
            raise UserError(_changed(folder, table))
        # Labels are mostly zeros, so that the file may be much smaller; every image has at least a byte in a shard.
        stored = read_npz(io.BytesIO(content), usual=max(USUAL, 2 * len(images) * len(classes)))
        labels, ids = stored["labels"], [name.decode(errors="surrogatepass") for name in stored["ids"].tolist()]
        if labels.dtype != np.int8 or not len(ids) == len(labels) == len(images):
            raise ValueError(f"it should have a row of int8 and an id for each of the {len(images)} images")
        images.ids = ids
        return Split(split, classes, labels, ids, images)


def source_of(root: str | os.PathLike) -> str:
    """Return the `data.name` of the original data set, such as voc2012; UserError if `root` is not a packed one."""
    return read_manifest(root)[1]["source"]


def verify(root: str | os.PathLike) -> Iterator[str]:
    """Compare every file with its sha256; yield one sentence per damaged or missing file and "" per intact one.

    On an object store, files are read from the store, not from the cache. Raises UserError if `root` is not a packed
    data set.
    """
    folder, manifest = read_manifest(root)
    files = [item for split in manifest["splits"] for item in _files_of(folder, manifest, split)]
    with ThreadPoolExecutor(STREAMS if "://" in str(folder) else os.cpu_count()) as pool:
        yield from pool.map(functools.partial(_verify_file, folder), files)


def _verify_file(folder: epath.Path, item: PackedFile) -> str:
    if wrong := next(_sizes(folder, [item]), ""):
        return wrong
    with (folder / item.file).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == item.sha256 else _changed(folder, item)


def read_manifest(root: str | os.PathLike) -> tuple[epath.Path, dict]:
    """Return the folder `root` and its manifest; UserError if it is not a packed data set or is incomplete."""
    if not os.fspath(root):
        raise UserError("data.root is empty; set it to the folder that --mode=pack wrote")
    folder = epath.Path(root).expanduser()
    try:
        is_folder = folder.is_dir()
    except (ImportError, OSError) as error:  # etils imports the packages for object stores on demand
        raise UserError(f"cannot read data.root {folder}: {error}") from error
    if not is_folder:
        raise UserError(f"data.root is '{folder}', which is not a folder; set it to the one that --mode=pack wrote")
    path = folder / MANIFEST
    if not path.exists():
        if (folder / UNFINISHED).exists():
            raise UserError(f"{folder} is incomplete; repeat the --mode=pack command to finish it")
        raise UserError(f"there is no {MANIFEST} in {folder}; set data.root to the folder that --mode=pack wrote")
    manifest = Folder(folder).read_json(MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path} does not have format {FORMAT}, which this version reads; pack the data set again")
    with damage_explained(path):
        texts = (manifest["source"], *manifest["classes"], *manifest["splits"])
        if not (isinstance(manifest["classes"], list) and all(isinstance(text, str) for text in texts)):
            raise TypeError("source, classes and splits should be names")
        for split in manifest["splits"]:
            _files_of(folder, manifest, split)
    return folder, manifest


def _files_of(folder: epath.Path, manifest: dict, split: str) -> list[PackedFile]:
    """Return the file of the labels of a split, and its shards."""
    of_split = manifest["splits"][split]
    return [PackedFile.of(entry, folder / MANIFEST) for entry in (of_split["labels"], *of_split["shards"])]


def _sizes(folder: epath.Path, files: Sequence[PackedFile]) -> Iterator[str]:
    """Yield one sentence per file that is missing or has another size than in the manifest."""

    def size(item: PackedFile) -> int | None:
        try:
            return (folder / item.file).stat().length
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(STREAMS) as pool:
        for item, found in zip(files, pool.map(size, files), strict=True):
            if found is None:
                yield f"{folder / item.file} is missing; copy it there, or repeat the --mode=pack command"
            elif found != item.bytes:
                yield (
                    f"{folder / item.file} has {found:,} bytes instead of {item.bytes:,}; copy it again, or repeat "
                    "the --mode=pack command"
                )


def _changed(folder: epath.Path, item: PackedFile) -> str:
    return (
        f"{folder / item.file} has changed since it was packed (its sha256 differs); copy it again, or delete it and "
        "repeat the --mode=pack command"
    )


class PackedImages(EncodedImages):
    """The images of one split, in the order of `shards`; error messages name them by `ids`.

    Threads can read concurrently. A shard is opened when it is first needed, separately in each worker process.
    """

    def __init__(self, folder: str, shards: Sequence[PackedFile], ids: Sequence[str]):
        self.folder, self.shards, self.ids = folder, shards, ids
        self._ends = np.cumsum([shard.records for shard in shards])
        self._forget()

    def _forget(self) -> None:
        self._readers: OrderedDict[int, ArrayRecordReader] = OrderedDict()  # in order of last use
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in self.shards]

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("_readers", "_lock", "_opening")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def name(self, row: int) -> str:
        """Return the id of image `row` and the shard that contains it."""
        return f"{self.ids[row]} in {self.folder}/{self.shards[self._place(row)[0]].file}"

    def encoded(self, row: int) -> bytes:
        """Return the packed bytes of image `row`; BadImage if the shard is damaged at its position."""
        number, position = self._place(row)
        reader = self._reader(number)
        try:
            return reader.read([position])[0]
        except RuntimeError as error:  # raised by the C++ library, which checks a hash per record
            raise BadImage(
                f"cannot read {self.name(row)} as an image: the shard is damaged ({error}); --mode=data finds all "
                "damaged files"
            ) from error

    def _place(self, row: int) -> tuple[int, int]:
        """Return the index of the shard of image `row` and the position of the image in it."""
        row = range(len(self))[row]
        number = int(np.searchsorted(self._ends, row, side="right"))
        return number, int(row - self._ends[number] + self.shards[number].records)

    def _reader(self, number: int) -> ArrayRecordReader:
        with self._opening[number]:  # so that two threads do not fetch the same shard
            with self._lock:
                reader = self._readers.get(number)
            if reader is None:
                reader = self._open(number)
            with self._lock:
                self._readers[number] = reader
                self._readers.move_to_end(number)
                if len(self._readers) > OPEN_SHARDS:
                    self._readers.popitem(last=False)  # closed when its last user releases it
        return reader

    def _open(self, number: int) -> ArrayRecordReader:
        shard = self.shards[number]
        path = _cached(self.folder, shard) if "://" in self.folder else f"{self.folder}/{shard.file}"
        # No read-ahead: images are read by position, mostly in random order.
        reader = ArrayRecordReader(path, "readahead_buffer_size:0", file_reader_buffer_size=1 << 15)
        if reader.num_records() != shard.records:  # also if the file is missing, which does not raise
            found = reader.num_records()
            raise UserError(f"{path} contains {found} images instead of {shard.records}; pack the data set again")
        return reader


def _cached(folder: str, shard: PackedFile) -> str:
    """Return the path of the local copy of a shard on an object store; copy and verify it if it is not in the cache.

    Raises UserError if the shard cannot be copied or has changed since it was packed.
    """
    local = cache_folder() / "packed" / f"{shard.sha256}.arrayrecord"
    if local.is_file() and local.stat().st_size == shard.bytes:
        return str(local)
    source = epath.Path(folder) / shard.file
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=local.parent, prefix="fetching-") as place:
            partial = Path(place) / "shard"
            source.copy(partial)
            with open(partial, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != shard.sha256:
                raise UserError(_changed(epath.Path(folder), shard))
            partial.replace(local)
    except OSError as error:
        raise UserError(
            f"cannot copy {source} to {local.parent}: {error.strerror or error}; the cache needs space for the whole "
            "data set, and MLMOE_CACHE sets its folder"
        ) from error
    return str(local)


PACKED = Source(
    lambda data_config, split, classes: open_packed(data_config.root, split),
    original=lambda data_config: source_of(data_config.root),
)
