"""The shards of a packed data set: what one holds, and the processes that write them.

What worker processes import must not bring JAX along.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from array_record.python.array_record_module import ArrayRecordWriter
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data.duplicates import cores
from mlmoe_jax.data.images import BadImage, Images, read_image
from mlmoe_jax.data.sources.packed import UNFINISHED
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.storage import Folder, whole_file

SAVE_EVERY = 5.0  # seconds; an object store limits how often one object may be replaced
LOOK_EVERY = 0.2  # seconds between looks at how far the workers are

# One record a group gives random access to each image; compressing what is compressed already only costs time.
RECORD_OPTIONS = "group_size:1,uncompressed"


@dataclass(frozen=True)
class Settings:
    """What decides the content of the shards: `config.pack`, and skip_bad, whether unreadable images are left out."""

    shard_images: int
    short_side: int
    quality: int
    skip_bad: bool

    @classmethod
    def of(cls, config: ConfigDict) -> Settings:
        """Read a config; UserError for numbers out of range."""
        pack = config.pack
        if pack.short_side < 0 or pack.processes < 0 or pack.quality > 100:
            raise UserError("pack.short_side and pack.processes must be at least 0 and pack.quality at most 100")
        return cls(pack.shard_images, pack.short_side, pack.quality, config.data.bad_images == "skip")


@dataclass(frozen=True)
class Shard:
    """A shard to write: the images `rows` of a split, as number `number` of its shards."""

    split: str
    number: int
    file: str
    rows: range


class Tally:
    """What the workers tell, the number of images done, and what they are told, to stop."""

    def __init__(self, context):
        self.done, self.stop = context.Value("q", 0), context.Value("b", 0)


class _Stopped(Exception):
    """A worker was told to stop within a shard."""


class Packer:
    """Writes one shard after the other; picklable, for worker processes."""

    def __init__(self, folder: str, splits: Sequence[Split], settings: Settings):
        self.folder, self.settings = folder, settings
        self.sources: dict[str, tuple[Images, Sequence[str]]] = {s.name: (s.images, s.ids) for s in splits}

    def __call__(self, shard: Shard, tally: Tally) -> dict[str, Any] | None:
        """Write a shard and return its entry for the manifest; None when told to stop.

        Raises BadImage for an image that cannot be read, unless those are left out, and OSError where it cannot write.
        """
        try:
            with whole_file(Folder(self.folder) / shard.file) as partial:
                left_out = self._write(shard, str(partial), tally)
                size = partial.stat().st_size
                with open(partial, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except _Stopped:
            return None
        records = len(shard.rows) - len(left_out)
        return {"file": shard.file, "records": records, "bytes": size, "sha256": sha256, "left_out": left_out}

    def _write(self, shard: Shard, path: str, tally: Tally) -> list[dict[str, Any]]:
        """Write the images of a shard to a local file; return what was left out. Raises _Stopped when told to stop."""
        images, ids = self.sources[shard.split]
        left_out = []
        with _record_file(path) as write:
            for row in shard.rows:
                if tally.stop.value:
                    raise _Stopped
                try:
                    write(stored_bytes(images, row, ids[row], self.settings))
                except BadImage as error:
                    if not self.settings.skip_bad:
                        raise
                    left_out.append({"row": row, "id": ids[row], "why": str(error)})
                with tally.done.get_lock():
                    tally.done.value += 1
        return left_out


@contextlib.contextmanager
def _record_file(path: str) -> Iterator[Callable[[bytes], None]]:
    """Open a local ArrayRecord file; yield what writes one record, which raises OSError where that fails."""
    try:
        with contextlib.closing(ArrayRecordWriter(path, RECORD_OPTIONS)) as writer:
            yield writer.write
    except RuntimeError as error:  # what the C++ library raises for anything
        raise OSError(str(error).partition(";")[0]) from error


def stored_bytes(images: Images, row: int, name: str, settings: Settings) -> bytes:
    """Return what is stored for image `row`: its file as it is, or a JPEG with the short side of the settings.

    Every image is decoded, so that what is packed can be read. Only larger images are stored anew.
    Raises BadImage, which says `name`.
    """
    data = images.encoded(row)
    pixels = read_image(data, name=name)
    height, width = pixels.shape[:2]
    if not settings.short_side or min(height, width) <= settings.short_side:
        return data
    scale = settings.short_side / min(height, width)
    image = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Training resizes once more. Lanczos and full colour resolution bring that 6 dB nearer to resizing the original
    # than the bilinear filter and 4:2:0 do, for 29 % more bytes.
    image.save(buffer, "JPEG", quality=settings.quality, subsampling="4:4:4")
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------------ workers
def write_shards(
    packer: Packer, shards: Sequence[Shard], processes: int, asked: threading.Event, manifest: dict[str, Any]
) -> None:
    """Write `shards` and enter each into the manifest; return early when asked to stop."""
    total = sum(len(images) for images, _ in packer.sources.values())
    progress = Progress("pack", total, 1, first=total - sum(len(shard.rows) for shard in shards))
    context = multiprocessing.get_context("spawn")  # a fork could stop for ever at a lock of one of JAX's threads
    tally = Tally(context)
    executor, run = _workers(packer, tally, context, min(processes or cores(), len(shards)))
    shown, saved = 0, time.monotonic()
    try:
        pending = {_submitted(executor, run, shard): shard for shard in shards}
        while pending and not asked.is_set():
            finished, _ = wait(pending, timeout=LOOK_EVERY, return_when=FIRST_COMPLETED)
            for _ in range(tally.done.value - shown):
                progress.advance()
                shown += 1
            for future in finished:
                shard = pending.pop(future)
                manifest["splits"][shard.split]["shards"][shard.number] = future.result()
            if finished and time.monotonic() - saved > SAVE_EVERY:
                Folder(packer.folder).write_json(UNFINISHED, manifest)
                saved = time.monotonic()
    except BrokenProcessPool as error:
        for worker in multiprocessing.active_children():  # the pool waits for one that was started while it broke
            worker.kill()
        raise UserError(
            "a packing process was killed, perhaps for lack of memory; lower --config.pack.processes and give the same "
            "command again to go on"
        ) from error
    finally:
        tally.stop.value = 1
        with contextlib.suppress(OSError):  # a pool that broke may have closed its pipes already
            executor.shutdown(cancel_futures=True)
        progress.close()


def _submitted(executor: Executor, run: Callable, shard: Shard) -> Future:
    try:
        return executor.submit(run, shard)
    except (OSError, ValueError) as error:  # from the pipes of a pool that broke since the last shard
        raise BrokenProcessPool(str(error)) from error


def _workers(packer: Packer, tally: Tally, context, count: int) -> tuple[Executor, Callable[[Shard], dict | None]]:
    """Return what runs shards, and the function it runs: a thread of this process, or `count` processes."""
    # Not threads: reading a small photograph holds Python's lock for a fifth of the time, enough for five cores.
    if count <= 1:
        return ThreadPoolExecutor(1), functools.partial(packer, tally=tally)
    return ProcessPoolExecutor(count, context, _start_worker, (packer, tally)), _work


# Set once in each worker process, which gets its packer and tally when it starts, not with every shard.
_in_worker: tuple[Packer, Tally] | None = None


def _start_worker(packer: Packer, tally: Tally) -> None:
    global _in_worker
    _in_worker = packer, tally
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(shard: Shard) -> dict[str, Any] | None:
    packer, tally = _in_worker
    return packer(shard, tally)
