"""The images of tar files, such as the shards of WebDataset, with random access to each.

One pass over the headers of a shard writes an index to the cache folder: the name, position and size of every member,
and the content of the text files, which may be labels. Nothing is extracted, so the names of members lead nowhere.

A shard has to be uncompressed, because a compressed one can only be read from its start. It needs about as much space,
because images hardly compress.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath
from filelock import FileLock

from mlmoe_jax.data.containers.files_of_splits import COMPRESSED, find_splits
from mlmoe_jax.data.containers.reach import Place, open_source, read_range, version_of
from mlmoe_jax.data.decoding import MAX_FILE, BadImage
from mlmoe_jax.data.image_search import image_suffixes, is_skipped
from mlmoe_jax.data.images import EncodedImages
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import MIB, cache_folder, damage_explained, disk_errors_explained
from mlmoe_jax.runtime.progress import heartbeat
from mlmoe_jax.runtime.storage import atomic_file

TEXTS = (".json", ".cls", ".txt", ".labels")  # suffixes of members that may be labels
MOST_TEXT = MIB  # bytes of such a member
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
    if compressed := next(filter(COMPRESSED.fullmatch, () if shards else place.names), ""):
        raise UserError(
            f"{place.folder}/{compressed} is compressed, so its images cannot be read one by one; unpack it to a .tar "
            "file, which needs about as much space, because images hardly compress"
        )
    for name in place.names if shards else ():
        if name not in shards:
            usage.leave_out("beside the tar files", name)
    return shards


class Shard(NamedTuple):
    """A tar file: its path or address, the path of its index, and the field of its images, see `open_tar`."""

    path: str
    index: str
    field: str = ""


def open_shard(path: str, title: str, field: str = "") -> Shard:
    """Return a shard, whose index is written if the cache does not have it; UserError if the shard is damaged.

    `title` is its name for errors.
    """
    with damage_explained(title):
        version = hashlib.sha256(version_of(path).encode()).hexdigest()
    index = cache_folder() / "tar" / f"{version}.arrow"
    with disk_errors_explained(index):
        index.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(index.with_suffix(".lock")):
            if not index.exists():
                _write_index(path, title, index)
    return Shard(path, str(index), field)


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def read_index(index: str) -> pa.Table:
    """Return the members of a shard, see _MEMBERS. They are mapped from the file of the index, not read."""
    return pa.ipc.open_file(pa.memory_map(index)).read_all()


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def image_members(shard: Shard) -> np.ndarray:
    """Return which members of a shard are its images, i64[n]."""
    is_image = pc.and_(pc.is_null(read_index(shard.index)["text"]), pc.is_null(_find_reasons(shard)))
    return np.flatnonzero(is_image.to_numpy())


def _find_reasons(shard: Shard) -> pa.ChunkedArray:
    """Return per member of a shard why it is neither a text nor one of the images; null if it is."""
    table = read_index(shard.index)
    if not shard.field:
        return table["unused"]
    has_field = pc.match_substring_regex(table["name"], rf"(?i)(^|/)[^./]+\.{re.escape(shard.field)}$")
    is_used = pc.or_(pc.or_(has_field, pc.is_valid(table["text"])), pc.is_valid(table["unused"]))
    return pc.if_else(is_used, table["unused"], f"not of the field {shard.field}")


def count_unused(shard: Shard, title: str, usage: Usage, *, texts: bool) -> None:
    """Add the members of a shard that are not used to an account. `texts`: whether the texts are used."""
    table, reasons = read_index(shard.index), _find_reasons(shard)
    if not texts:
        reasons = pc.if_else(pc.is_valid(table["text"]), _NO_IMAGE, reasons)
    members = pa.table({"name": table["name"], "reason": reasons}).filter(pc.is_valid(reasons))
    groups = members.group_by("reason", use_threads=False).aggregate([("name", "first"), ("name", "count")])
    for group in groups.to_pylist():
        usage.leave_out(group["reason"], f"{title}#{group['name_first']}", group["name_count"])


# --------------------------------------------------------------------------------------------------------------- index
def _write_index(path: str, title: str, index: Path) -> None:
    members = _read_members(path, title)
    with atomic_file(epath.Path(index)) as partial, pa.ipc.new_file(str(partial), _MEMBERS) as writer:
        while rows := list(itertools.islice(members, _AT_ONCE)):
            writer.write_batch(pa.RecordBatch.from_pylist(rows, _MEMBERS))
            heartbeat()


def _read_members(path: str, title: str) -> Iterator[dict[str, Any]]:
    """Yield the members of a tar file that are no folders, see _MEMBERS; UserError if the file is damaged."""
    last = ""
    with damage_explained(title), open_source(path) as file:
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
            raise UserError(f"{title} {what} ({error}); write or copy it again, or remove it") from error


def _describe(member: tarfile.TarInfo, file: BinaryIO) -> dict[str, Any]:
    name = posixpath.normpath("/" + member.name.replace("\\", "/")).lstrip("/")
    name = name.encode(errors="replace").decode()  # of an archive in another encoding than UTF-8
    suffix = posixpath.splitext(name)[1].lower()
    text = unused = None
    if any(map(is_skipped, name.split("/"))):
        unused = "hidden or of the system"
    elif not member.isreg() or member.issparse():
        unused = "that are links or sparse"
    elif suffix in TEXTS and member.size <= MOST_TEXT:
        file.seek(member.offset_data)
        text = file.read(member.size)
    elif suffix not in image_suffixes():
        unused = _NO_IMAGE
    return {"name": name, "start": member.offset_data, "size": member.size, "text": text, "unused": unused}


def _require_end(file: BinaryIO, position: int) -> None:
    """Raise ReadError unless only zeros, and at least a block of them, follow the last member."""
    file.seek(position)
    pieces = iter(functools.partial(file.read, MIB), b"")
    if len(first := next(pieces, b"")) < tarfile.BLOCKSIZE or any(first[: tarfile.BLOCKSIZE]):
        raise tarfile.ReadError("no end of the archive")
    if any(map(any, (first, *pieces))):
        raise tarfile.ReadError("further data after the end of the archive, such as another one")


# -------------------------------------------------------------------------------------------------------------- images
@dataclass(eq=False)
class TarImages(EncodedImages):
    """The images of shards, in the order of their members.

    Attributes:
      title: the folder of the shards in the names of images, and `names` are the paths of the shards below it.
    """

    title: str
    names: Sequence[str]
    shards: Sequence[Shard]

    def __post_init__(self):
        self._ends = np.cumsum([len(image_members(shard)) for shard in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def name(self, row: int) -> str:
        number, member = self._locate(row)
        member_name = read_index(self.shards[number].index)["name"][member]
        return f"{self.title}/{self.names[number]}#{member_name}"

    def find_rows(self, names: Sequence[str]) -> np.ndarray:
        """Return the rows i64[n] of images with names such as `name`, but without the folder."""
        known = []
        for name, shard in zip(self.names, self.shards, strict=True):
            members = read_index(shard.index)["name"].take(image_members(shard))
            known += pc.binary_join_element_wise(name, members, "#").chunks
        rows = pc.index_in(pa.array(names, pa.string()), pa.chunked_array(known, pa.string()))
        return rows.to_numpy().astype(np.int64)

    def encoded(self, row: int) -> bytes:
        number, member = self._locate(row)
        shard = self.shards[number]
        table = read_index(shard.index)
        start, size = table["start"][member].as_py(), table["size"][member].as_py()
        try:
            if size > MAX_FILE:
                raise OSError(errno.EFBIG, f"it has more than {MAX_FILE:,} bytes")
            return read_range(shard.path, start, size)
        except (OSError, UserError) as error:
            raise BadImage(f"cannot read {self.name(row)} as an image: {reason_of(error)}") from error

    def stamp(self, row: int) -> str:
        number, member = self._locate(row)
        return f"{self.shards[number].index} {member}"

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the numbers of the shard that contains image `row`, and of its member."""
        row = range(len(self))[row]
        number = int(np.searchsorted(self._ends, row, side="right"))
        return number, int(image_members(self.shards[number])[row - self._ends[number]])  # from the end of its images


def open_tar(folder: str, names: Sequence[str], usage: Usage, field: str = "", *, title: str) -> TarImages:
    """Return the images of the tar files `names` below `folder`, in order. `usage` counts the other members.

    `field` is the part of the names of images after the first dot; "" stands for any. `title` is the folder in the
    names of images. Raises UserError if a file is damaged.
    """
    shards = []
    for name in names:
        shown = f"{title}/{name}"
        shards.append(open_shard(f"{folder}/{name}", shown, field))
        count_unused(shards[-1], shown, usage, texts=False)
    return TarImages(title, names, shards)
