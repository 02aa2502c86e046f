"""Write the shards of a packed data set in worker processes, whose modules must not import JAX."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from mlmoe_jax.data.images import STRICT, BadImage, Decoding, Images, read_image
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import sha256_of
from mlmoe_jax.runtime.storage import Folder, whole_file

QUALITY = 95  # of JPEG, for images that are stored smaller
# One record per group gives random access to each image; compressing already compressed images only costs time.
RECORD_OPTIONS = "group_size:1,uncompressed"


@dataclass(frozen=True)
class Shard:
    """A shard to write: index `number`, with the images `rows` of a split."""

    split: str
    number: int
    file: str
    rows: range


@dataclass(frozen=True)
class Packer:
    """Writes shards one after another; can be pickled for worker processes.

    Attributes:
      folder: folder of the shards.
      splits: name -> images and ids.
      short_side: `pack.short_side`.
      skip_bad: whether unreadable images are left out instead of raising BadImage.
    """

    folder: str
    splits: dict[str, tuple[Images, Sequence[str]]]
    short_side: int = 0
    skip_bad: bool = False
    decoding: Decoding = STRICT

    def __call__(self, shard: Shard) -> dict[str, Any]:
        """Write a shard and return its entry for the manifest."""
        images, ids = self.splits[shard.split]
        left_out = []
        with whole_file(Folder(self.folder) / shard.file) as partial:
            with contextlib.closing(ArrayRecordWriter(str(partial), RECORD_OPTIONS)) as writer:
                for row in shard.rows:
                    try:
                        writer.write(self.stored_bytes(images, row, ids[row]))
                    except BadImage as error:
                        if not self.skip_bad:
                            raise
                        left_out.append({"row": row, "id": ids[row], "why": str(error)})
            size, sha256 = partial.stat().st_size, sha256_of(partial)
        records = len(shard.rows) - len(left_out)
        return {"file": shard.file, "records": records, "bytes": size, "sha256": sha256, "left_out": left_out}

    def stored_bytes(self, images: Images, row: int, name: str) -> bytes:
        """Return the bytes to store for image `row`: its unchanged file, or a smaller JPEG for a larger image.

        Every image is decoded, so that a shard contains only readable images. Raises BadImage with `name` for an
        unreadable image.
        """
        data = images.encoded(row)
        pixels = read_image(data, name=name, decoding=self.decoding)
        height, width = pixels.shape[:2]
        if not self.short_side or min(height, width) <= self.short_side:
            return data
        scale = self.short_side / min(height, width)
        image = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        # Training resizes the image again. With Lanczos and full color resolution, the result is 6 dB closer to the
        # resized original than with the bilinear filter and 4:2:0, for 29 % more bytes.
        image.save(buffer, "JPEG", quality=QUALITY, subsampling="4:4:4")
        return buffer.getvalue()


def write_shards(packer: Packer, shards: Sequence[Shard], processes: int) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Write shards in several processes, and yield each complete shard with its entry for the manifest.

    If the caller closes the iterator, the processes complete the present shards and start no new shard.
    """
    # Reading a small photograph holds the GIL for a fifth of the time, which would limit threads to five cores.
    if min(processes, len(shards)) <= 1:
        for shard in shards:
            yield shard, packer(shard)
        return
    context = multiprocessing.get_context("spawn")  # a forked process could deadlock on a lock of one of JAX's threads
    executor = ProcessPoolExecutor(min(processes, len(shards)), context, _start_worker, (packer,))
    try:
        futures = {executor.submit(_work, shard): shard for shard in shards}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        for worker in multiprocessing.active_children():  # the pool would wait for a worker that has just started
            worker.kill()
        raise UserError(
            "a packing process was killed, perhaps because memory ran out; lower --config.data.workers and repeat "
            "the command to resume"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # a broken pool may already have closed its pipes
            executor.shutdown(cancel_futures=True)


# Global in each worker process, so that the packer is not sent with every shard.
_in_worker: Packer | None = None


def _start_worker(packer: Packer) -> None:
    global _in_worker
    _in_worker = packer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but only the parent handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(shard: Shard) -> dict[str, Any]:
    return _in_worker(shard)
