"""Write the shards of a packed data set in worker processes, whose modules must not import JAX."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any

from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from mlmoe_jax.data.decoding import STRICT, BadImage, Decoding, read_image
from mlmoe_jax.data.images import Images
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import file_sha256
from mlmoe_jax.runtime.storage import Folder, atomic_file
from mlmoe_jax.runtime.workers import WorkerLost, Workers, can_start

JPEG_QUALITY = 95  # for images that are stored smaller
# One record per group gives random access to each image; compressing already compressed images only costs time.
RECORD_OPTIONS = "group_size:1,uncompressed"


@dataclass(frozen=True)
class Shard:
    """A shard to write: consecutive images of a split.

    `first_row` is the row of the first image in the split, and `source_sha256` the fingerprint of the split.
    """

    file: str
    images: Images
    ids: Sequence[str]
    first_row: int
    source_sha256: str

    @property
    def sidecar(self) -> str:
        """The name of the JSON file that is written after the shard. It has the shard's entry of the manifest."""
        return f"{self.file}.json"


@dataclass(frozen=True)
class ShardWriter:
    """A function that writes shards. It can be pickled for worker processes.

    Attributes:
      short_side: `pack.short_side`, the short side in pixels to which larger images are reduced; 0 keeps all sizes.
      skip_bad: whether unreadable images are left out. Otherwise BadImage is raised.
      decoding: how images are decoded to check them.
    """

    folder: str
    short_side: int = 0
    skip_bad: bool = False
    decoding: Decoding = STRICT

    def __call__(self, shard: Shard) -> dict[str, Any]:
        """Write a shard and its sidecar. Return the entry of the shard in the manifest."""
        folder, versions, left_out = Folder(self.folder), [], []
        with atomic_file(folder / shard.file) as partial:
            with contextlib.closing(ArrayRecordWriter(str(partial), RECORD_OPTIONS)) as records:
                for position, name in enumerate(shard.ids):
                    versions.append(["", ""])
                    try:
                        stamp, data = shard.images.stamp(position), shard.images.encoded(position)
                        versions[-1] = [stamp, hashlib.sha256(data).hexdigest()]
                        records.write(encode_image(data, name, self))
                    except BadImage as error:
                        if not self.skip_bad:
                            raise
                        left_out.append({"row": shard.first_row + position, "id": name, "why": str(error)})
            size, sha256 = partial.stat().st_size, file_sha256(partial)
        stored = len(shard.ids) - len(left_out)
        entry = {"file": shard.file, "records": stored, "bytes": size, "sha256": sha256, "left_out": left_out}
        sidecar = {"source_sha256": shard.source_sha256, "versions": versions, "entry": entry}
        folder.write_json(shard.sidecar, sidecar)
        return entry


def is_version(images: Images, row: int, version: Sequence[str]) -> bool:
    """Return whether an image has not changed since the pair `version`, [stamp, sha256], was recorded.

    It has not changed if its stamp or the SHA-256 of its bytes is equal: a touched or copied file has another stamp.
    Both texts are "" if the image had no bytes.
    """
    try:
        return images.stamp(row) == version[0] or hashlib.sha256(images.encoded(row)).hexdigest() == version[1]
    except BadImage:
        return not version[1]


def encode_image(data: bytes, name: str, writer: ShardWriter) -> bytes:
    """Return the bytes to store for an image: its file `data`, or a JPEG that is reduced to `writer.short_side`.

    Every image is decoded, so that a shard has only readable images. The message of a BadImage error calls the image
    `name`.
    """
    pixels = read_image(data, name=name, decoding=writer.decoding)
    height, width = pixels.shape[:2]
    if not writer.short_side or min(height, width) <= writer.short_side:
        return data
    scale = writer.short_side / min(height, width)
    image = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Training resizes the image again. With Lanczos and full color resolution, the result is 6 dB closer to the resized
    # original than with the bilinear filter and 4:2:0, for 29 % more bytes.
    image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling="4:4:4")
    return buffer.getvalue()


def write_shards(writer: ShardWriter, shards: Sequence[Shard], processes: int) -> Iterator[dict[str, Any]]:
    """Write shards in several processes. Yield the manifest entry of each shard when it is complete.

    If the caller closes the iterator, the processes complete the shards in progress and start no other shard. Raises
    UserError if a process was killed.
    """
    # Reading a small photograph holds the GIL for a fifth of the time, which would limit threads to five cores.
    processes = min(processes, len(shards))
    if processes <= 1 or not can_start():
        yield from map(writer, shards)
        return
    with contextlib.closing(Workers(writer, processes)) as workers:
        try:
            for future in as_completed([workers.submit(shard) for shard in shards]):
                yield future.result()
        except WorkerLost as error:
            workers.kill()  # instead of waiting for the shards in progress
            raise UserError(
                "a packing process was killed, perhaps because memory ran out; lower --config.data.workers and repeat "
                "the command to resume"
            ) from error
