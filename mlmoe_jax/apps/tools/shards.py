"""Write the shards of a packed data set in worker processes, whose modules must not import JAX."""

import contextlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from mlmoe_jax.data.decoding import BRIGHTEST, STRICT, BadImage, Decoding, has_frames, open_image
from mlmoe_jax.data.images import Images
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import disk_errors_explained, file_sha256
from mlmoe_jax.runtime.storage import Folder, atomic_file, working_file
from mlmoe_jax.runtime.workers import WorkerLost, Workers, can_start

SHARD, SIDECAR = ".arrayrecord", ".json"  # the suffix of a shard, and of its description after this
JPEG_QUALITY = 95  # for images that are stored smaller
# One record per group gives random access to each image; compressing already compressed images only costs time.
RECORD_OPTIONS = "group_size:1,uncompressed"

Description = dict[str, Any]  # of a shard, see `ShardWriter.__call__`


@dataclass(frozen=True)
class Shard:
    """A shard to write: consecutive images of a split.

    Attributes:
      name: the start of its name, before the sha256 of its content.
      first_row: the row of the first image in the split.
      key: a digest of what it is packed from.
    """

    name: str
    images: Images
    ids: Sequence[str]
    first_row: int
    key: str


@dataclass(frozen=True)
class ShardWriter:
    """A function that writes a shard by its number in `shards`. It can be pickled for worker processes.

    Attributes:
      short_side: `pack.short_side`, the short side in pixels to which larger images are reduced; 0 keeps all sizes.
      skip_bad: whether unreadable images are left out. Otherwise BadImage is raised.
      decoding: how images are decoded to check them.
    """

    folder: str
    short_side: int = 0
    skip_bad: bool = False
    decoding: Decoding = STRICT
    shards: Sequence[Shard] = ()

    def __call__(self, number: int) -> Description:
        """Write a shard, and then its description, for which each image is read once, in order.

        Return the description: the `key` of the shard, the `file`, its `records`, `bytes` and `sha256`, the images that
        are `left_out`, the ids of those with `several_frames`, and the `brightest` value of each 16-bit grayscale
        image.
        """
        folder, shard = Folder(self.folder), self.shards[number]
        with disk_errors_explained(folder / shard.name), working_file(folder) as partial:
            found = self._write_records(shard, partial)
            sha256 = file_sha256(partial)
            file = f"{shard.name}-{sha256[:16]}{SHARD}"
            stored = {"file": file, "bytes": partial.stat().st_size, "sha256": sha256}
            with atomic_file(folder / file) as target:
                os.replace(partial, target)
        records = len(shard.ids) - len(found["left_out"])
        description = {"key": shard.key, "records": records, **stored, **found}
        folder.write_json(f"{file}{SIDECAR}", description)
        return description

    def _write_records(self, shard: Shard, path: Path) -> dict[str, list[Any]]:
        """Write the images of a shard to a file, and return what was found in them."""
        left_out, frames, brightest = [], [], []
        with contextlib.closing(ArrayRecordWriter(str(path), RECORD_OPTIONS)) as records:
            for position, name in enumerate(shard.ids):
                try:
                    data = shard.images.encoded(position)
                    image = open_image(data, name=name, decoding=self.decoding)
                except BadImage as error:
                    if not self.skip_bad:
                        raise
                    left_out.append({"row": shard.first_row + position, "id": name, "why": str(error)})
                    continue
                records.write(shrink(data, image, self.short_side))
                frames += [name] * has_frames(data)
                brightest += [image.info[BRIGHTEST]] if BRIGHTEST in image.info else []
        return {"left_out": left_out, "several_frames": frames, "brightest": brightest}


def shrink(data: bytes, image: Image.Image, short_side: int) -> bytes:
    """Return the bytes to store for an image: its file `data`, or a JPEG that is reduced to `short_side`, if above 0.

    `image` is the decoded file.
    """
    if not short_side or min(image.size) <= short_side:
        return data
    scale = short_side / min(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Training resizes the image again. With Lanczos and full color resolution, the result is 6 dB closer to the resized
    # original than with the bilinear filter and 4:2:0, for 29 % more bytes.
    small.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling="4:4:4")
    return buffer.getvalue()


def write_shards(writer: ShardWriter, shards: Sequence[Shard], processes: int) -> Iterator[Description]:
    """Write shards in several processes. Yield the description of each shard when it is complete.

    A process writes consecutive shards in order, so that a row group of a Parquet file is read once. If the caller
    closes the iterator, the processes complete the shards in progress and start no other shard. Raises UserError if a
    process was killed.
    """
    # Reading a small photograph holds the GIL for a fifth of the time, which would limit threads to five cores.
    processes = min(processes, len(shards))
    if processes <= 1 or not can_start():
        yield from map(replace(writer, shards=shards), range(len(shards)))
        return
    bounds = [len(shards) * n // processes for n in range(processes + 1)]
    # Shards that are pickled together share an open container.
    runs = [replace(writer, shards=shards[start:end]) for start, end in itertools.pairwise(bounds)]
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(contextlib.closing(Workers(run, 1))) for run in runs]
        futures = [pool.submit(n) for pool, run in zip(pools, runs, strict=True) for n in range(len(run.shards))]
        try:
            for future in as_completed(futures):
                yield future.result()
        except WorkerLost as error:
            for pool in pools:
                pool.kill()  # instead of waiting for the shards in progress
            raise UserError(
                "a packing process was killed, perhaps because memory ran out; lower --config.data.workers and repeat "
                "the command to resume"
            ) from error
        finally:
            for future in futures:
                future.cancel()
