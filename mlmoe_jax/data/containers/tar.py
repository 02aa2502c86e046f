"""The images of tar files, such as the shards of WebDataset, with random access to each.

One pass over the headers of a shard writes an index to the cache folder: the name, position and size of every member,
and the content of the text files, which may be labels. Nothing is extracted, so the names of members lead nowhere.

A shard has to be uncompressed, because a compressed one can only be read from its start. It needs about as much space,
because images hardly compress.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath
from filelock import FileLock

from mlmoe_jax.data.containers.files_of_splits import find_splits
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
NO_IMAGE = "in no image format"
_COMPRESSED = re.compile(r".*\.(tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst|lz4))", re.IGNORECASE)
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
    if compressed := next(filter(_COMPRESSED.fullmatch, () if shards else place.names), ""):
        raise UserError(
            f"{place.folder}/{compressed} is compressed, so its images cannot be read one by one; unpack it to a .tar "
            "file, which needs about as much space, because images hardly compress"
        )
    for name in place.names if shards else ():
        if name not in shards:
            usage.leave_out("beside the tar files", name)
    return shards


class Shard(NamedTuple):
    """A tar file.

    Attributes:
      path: its path or address.
      name: its name for errors, which is another one if it is on the hub.
      index: the path of its index.
      field: the part of the names of its images after the first dot; "" stands for any.
    """

    path: str
    name: str
    index: str
    field: str


def _open_shard(path: str, name: str, field: str) -> Shard:
    """Return a shard, whose index is written if the cache does not have it; UserError if the shard is damaged."""
    with damage_explained(name):
        version = hashlib.sha256(version_of(path).encode()).hexdigest()
    index = cache_folder() / "tar" / f"{version}.arrow"
    with disk_errors_explained(index):
        index.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(index.with_suffix(".lock")):
            if not index.exists():
                _write_index(path, name, index)
    return Shard(path, name, str(index), field)


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def read_index(index: str) -> pa.Table:
    """Return the members of a shard, see _MEMBERS. They are mapped from the file of the index, not read."""
    return pa.ipc.open_file(pa.memory_map(index)).read_all()


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def image_members(shard: Shard) -> np.ndarray:
    """Return which members of a shard are its images, i64[n]."""
    return np.flatnonzero(pc.is_null(_list_uses(shard)).to_numpy())


def _list_uses(shard: Shard) -> pa.ChunkedArray:
    """Return per member of a shard why it is none of the images, null if it is one."""
    table = read_index(shard.index)
    reasons = pc.if_else(pc.is_valid(table["text"]), NO_IMAGE, table["unused"])
    if not shard.field:
        return reasons
    has_field = pc.match_substring_regex(table["name"], rf"(?i)(^|/)[^./]+\.{re.escape(shard.field)}$")
    return pc.if_else(pc.or_(has_field, pc.is_valid(reasons)), reasons, f"not of the field {shard.field}")


# --------------------------------------------------------------------------------------------------------------- index
def _write_index(path: str, title: str, index: Path) -> None:
    with atomic_file(epath.Path(index)) as partial:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, _MEMBERS) as writer:
            members = _read_members(path, title)
            while rows := list(itertools.islice(members, _AT_ONCE)):
                writer.write_batch(pa.RecordBatch.from_pylist(rows, _MEMBERS))
                heartbeat()
        names = read_index.__wrapped__(str(partial))["name"]
        if pc.count_distinct(names).as_py() < len(names):
            counts = names.value_counts().to_pylist()
            name = next(entry["values"] for entry in counts if entry["counts"] > 1)
            raise UserError(f"{title} has several members {name}; remove all but one, or write it again")


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
        unused = NO_IMAGE
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
    """The images of shards, in the order of their members."""

    shards: Sequence[Shard]

    def __post_init__(self):
        self._ends = np.cumsum([len(image_members(shard)) for shard in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def name(self, row: int) -> str:
        shard, member = self._locate(row)
        return f"{shard.name}#{read_index(shard.index)['name'][member]}"

    def encoded(self, row: int) -> bytes:
        shard, member = self._locate(row)
        table = read_index(shard.index)
        start, size = table["start"][member].as_py(), table["size"][member].as_py()
        try:
            if size > MAX_FILE:
                raise OSError(f"it has more than {MAX_FILE:,} bytes")
            return read_range(shard.path, start, size)
        except (OSError, UserError) as error:
            raise BadImage(f"cannot read {self.name(row)} as an image: {reason_of(error)}") from error

    def stamp(self, row: int) -> str:
        shard, member = self._locate(row)
        return f"{shard.index} {member}"

    def _locate(self, row: int) -> tuple[Shard, int]:
        """Return the shard that contains image `row`, and the number of its member in the shard."""
        row = range(len(self))[row]
        number = int(np.searchsorted(self._ends, row, side="right"))
        shard = self.shards[number]
        return shard, int(image_members(shard)[row - self._ends[number]])  # from the end of its images


def open_tar(folder: str, names: Iterable[str], usage: Usage, field: str = "", *, title: str) -> TarImages:
    """Return the images of the tar files `names` below `folder`, in order. `usage` counts the other members.

    `field` is as in `Shard`, and `title` is the folder in the names of images. Raises UserError if a file is damaged.
    """
    shards = [_open_shard(posixpath.join(folder, name), posixpath.join(title, name), field) for name in names]
    for shard in shards:
        members = pa.table({"name": read_index(shard.index)["name"], "reason": _list_uses(shard)})
        groups = members.group_by("reason", use_threads=False).aggregate([("name", "first"), ("name", "count")])
        for group in groups.filter(pc.is_valid(groups["reason"])).to_pylist():
            usage.leave_out(group["reason"], f"{shard.name}#{group['name_first']}", group["name_count"])
    return TarImages(shards)
