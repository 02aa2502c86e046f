"""The images of tar files, such as the shards of WebDataset, with random access to each.

One pass over the headers of a shard writes an index to the cache folder: the name, position and size of every member,
and the content of the text files, which may be labels. Nothing is extracted, so the names of members lead nowhere.

A shard has to be uncompressed, because a compressed one can only be read from its start. It needs about as much space,
because images hardly compress.
"""

from __future__ import annotations

import errno
import functools
import itertools
import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlmoe_jax.data.containers.files_of_splits import COMPRESSED, find_splits
from mlmoe_jax.data.containers.reach import Place, open_source, read_range, version_of
from mlmoe_jax.data.containers.stored import StoredImages, cache_batches, require_version
from mlmoe_jax.data.decoding import MAX_FILE
from mlmoe_jax.data.image_search import image_suffixes, is_skipped
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MIB, damage_explained
from mlmoe_jax.runtime.progress import heartbeat

TEXTS = (".json", ".cls", ".txt", ".labels")  # suffixes of members that may be labels
TEXT_BYTES = MIB  # bytes of such a member
_NO_IMAGE = "in no image format"
_OPEN_INDEXES = 256
_AT_ONCE = 10_000  # members that are added to an index at once
_MEMBERS = pa.schema(
    {
        "name": pa.string(),
        "start": pa.int64(),
        "size": pa.int64(),
        "text": pa.binary(),  # of the members with a suffix in TEXTS, otherwise null
        "unused": pa.string(),  # the reason why a member is neither an image nor a text, for an account, otherwise null
    }
)


# -------------------------------------------------------------------------------------------------------------- shards
def find_shards(place: Place, usage: Usage) -> dict[str, str | None]:
    """Return the tar files of a place, and the split that the path of each names, see `find_splits`.

    `usage` counts the files beside tar files. Raises UserError if all tar files are compressed.
    """
    shards = find_splits(place, ".tar")
    for name in place.names:
        if not shards and COMPRESSED.fullmatch(name):
            raise UserError(
                f"{place.folder}/{name} is compressed, so its images cannot be read one by one; unpack it to a .tar "
                "file, which needs about as much space, because images hardly compress"
            )
        if name not in shards:
            usage.leave_out("beside the tar files", name)
    return shards


def index_shard(path: str, version: str = "") -> str:
    """Return the path of the index of a shard, written if the cache has none; UserError if the shard is damaged.

    `version` is the version of the shard, "" stands for the present one.
    """
    return cache_batches(path, version or version_of(path), "tar", "", "", lambda: _read_batches(path))


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def read_index(index: str) -> pa.Table:
    """Return the members of a shard, see _MEMBERS. They are mapped from the file of the index, not read."""
    return pa.ipc.open_file(pa.memory_map(index)).read_all()


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def image_members(index: str) -> np.ndarray:
    """Return which members of a shard are images, i64[n]."""
    table = read_index(index)
    return np.flatnonzero(pc.and_(pc.is_null(table["text"]), pc.is_null(table["unused"])))


def count_unused(index: str, name: str, usage: Usage, *, texts: bool) -> None:
    """Add the members of shard `name` that are not used to an account. `texts`: whether the texts are used."""
    table = read_index(index)
    reasons = table["unused"]
    if not texts:
        reasons = pc.if_else(pc.is_valid(table["text"]), _NO_IMAGE, reasons)
    for group in pc.value_counts(reasons.drop_null()).to_pylist():
        usage.leave_out(group["values"], name, group["counts"])


# --------------------------------------------------------------------------------------------------------------- index
def _read_batches(path: str) -> Iterator[pa.RecordBatch]:
    """Yield the members of a tar file in batches, of which the last may be empty."""
    members = _read_members(path)
    size = _AT_ONCE
    while size == _AT_ONCE:
        batch = pa.RecordBatch.from_pylist(list(itertools.islice(members, _AT_ONCE)), _MEMBERS)
        size = len(batch)
        yield batch
        heartbeat()


def _read_members(path: str) -> Iterator[dict[str, Any]]:
    """Yield the members of a tar file that are no folders, see _MEMBERS; UserError if the file is damaged."""
    last = ""
    with damage_explained(path), open_source(path) as file:
        try:
            archive = tarfile.TarFile(fileobj=file)
            while (member := archive.next()) is not None:
                archive.members.clear()  # tarfile would keep all of them
                last = member.name
                if not member.isdir():
                    yield _describe(member, file)
            _require_end(file, archive.offset)
        except tarfile.ReadError as error:
            what = f"is damaged or truncated from its member {last} on" if last else "is not an uncompressed tar file"
            raise UserError(f"{path} {what} ({error}); write or copy it again, or remove it") from error


def _describe(member: tarfile.TarInfo, file: BinaryIO) -> dict[str, Any]:
    name = posixpath.normpath("/" + member.name.replace("\\", "/")).lstrip("/")
    name = name.encode(errors="replace").decode()  # of an archive in another encoding than UTF-8
    suffix = posixpath.splitext(name)[1].lower()
    text = unused = None
    if any(map(is_skipped, name.split("/"))):
        unused = "hidden or of the system"
    elif not member.isreg() or member.issparse():
        unused = "that are links or sparse"
    elif suffix in TEXTS and member.size <= TEXT_BYTES:
        file.seek(member.offset_data)
        text = file.read(member.size)
    elif suffix not in image_suffixes():
        unused = _NO_IMAGE
    return {"name": name, "start": member.offset_data, "size": member.size, "text": text, "unused": unused}


def _require_end(file: BinaryIO, position: int) -> None:
    """Raise ReadError unless only zeros, and at least a block of them, follow the last member."""
    file.seek(position)
    rest = file.read(MIB)
    if any(rest) or len(rest) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("further data after its end" if any(rest) else "no end of the archive")


# -------------------------------------------------------------------------------------------------------------- images
@dataclass(eq=False)
class TarImages(StoredImages):
    """The images of shards, in the order of their members. The parts are the shards, and `indexes` are theirs."""

    indexes: Sequence[str]

    def name(self, row: int) -> str:
        part, position = self.locate(row)
        index = self.indexes[part]
        return f"{self.title}/{self.names[part]}#{read_index(index)['name'][image_members(index)[position]]}"

    def identities(self) -> Iterator[str]:
        for shard, index in zip(self.names, self.indexes, strict=True):
            members = read_index(index).select(["name", "size"]).take(image_members(index))
            for member in members.to_pylist():
                yield f"{self.title}/{shard}#{member['name']} {member['size']}"

    def find_rows(self, names: Sequence[str]) -> np.ndarray:
        """Return the rows i64[n] of images with names such as `name`, but without the folder."""
        known = []
        for name, index in zip(self.names, self.indexes, strict=True):
            members = read_index(index)["name"].take(image_members(index))
            known += pc.binary_join_element_wise(name, members, "#").chunks
        return pc.index_in(pa.array(names, pa.string()), pa.chunked_array(known, pa.string())).to_numpy()

    def read_stored(self, part: int, position: int) -> bytes:
        """Return image `position` of a shard."""
        table = read_index(self.indexes[part])
        member = image_members(self.indexes[part])[position]
        start, size = table["start"][member].as_py(), table["size"][member].as_py()
        if size > MAX_FILE:
            raise OSError(errno.EFBIG, f"it has more than {MAX_FILE:,} bytes")
        path = f"{self.folder}/{self.names[part]}"
        try:
            return read_range(path, start, size)
        finally:
            if "://" not in path:  # where it would be a request per image
                require_version(path, self.versions[part])

    def stamp(self, row: int) -> str:
        part, position = self.locate(row)
        return f"{self.versions[part]} {position}"


def open_tar(folder: str, names: Sequence[str], title: str) -> TarImages:
    """Return the images of the tar files `names` below `folder`, see `TarImages`. UserError if a file is damaged."""
    paths = [f"{folder}/{name}" for name in names]
    versions = list(map(version_of, paths))
    indexes = list(map(index_shard, paths, versions))
    ends = np.cumsum([len(image_members(index)) for index in indexes], dtype=np.int64)
    return TarImages(folder, names, title, versions, ends, indexes)
