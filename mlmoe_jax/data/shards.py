"""Write the shards of a packed data set in worker processes.

Modules that worker processes import must not import JAX.
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

from mlmoe_jax.data.images import STRICT, BadImage, Decoding, Images, read_image
from mlmoe_jax.data.sources.packed import UNFINISHED
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.storage import Folder, whole_file

SAVE_EVERY = 5.0  # seconds; object stores limit how often one object can be replaced
UPDATE_EVERY = 0.2  # seconds between updates of the progress bar

# One record per group gives random access to each image; compressing already compressed images only costs time.
RECORD_OPTIONS = "group_size:1,uncompressed"


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of shards: `config.pack`.

    skip_bad: leave out unreadable images. decoding: how the images are read.
    """

    shard_images: int
    short_side: int
    quality: int
    skip_bad: bool
    decoding: Decoding = STRICT

    @classmethod
    def of(cls, config: ConfigDict) -> Settings:
        """Read a config; UserError for values out of range."""
        pack = config.pack
        if pack.short_side < 0 or pack.processes < 0 or pack.quality > 100:
            raise UserError("pack.short_side and pack.processes must be at least 0 and pack.quality at most 100")
        skip_bad, decoding = config.data.bad_images == "skip", Decoding.of(config.data)
        return cls(pack.shard_images, pack.short_side, pack.quality, skip_bad, decoding)


@dataclass(frozen=True)
class Shard:
    """A shard to write: the images `rows` of a split, as the shard with index `number`."""

    split: str
    number: int
    file: str
    rows: range


class Tally:
    """Values shared with the workers: `done`, the number of images written, and `stop`, a request to stop."""

    def __init__(self, context):
        self.done, self.stop = context.Value("q", 0), context.Value("b", 0)


class _Stopped(Exception):
    """A worker was asked to stop within a shard."""


class Packer:
    """Writes shards one after another; can be pickled for worker processes."""

    def __init__(self, folder: str, splits: Sequence[Split], settings: Settings):
        self.folder, self.settings = folder, settings
        self.sources: dict[str, tuple[Images, Sequence[str]]] = {s.name: (s.images, s.ids) for s in splits}

    def __call__(self, shard: Shard, tally: Tally) -> dict[str, Any] | None:
        """Write a shard and return its entry for the manifest; None if it was asked to stop.

        Raises BadImage for an unreadable image, unless these are left out, and OSError if writing fails.
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
        """Write the images of a shard to a local file; return the ones left out. Raises _Stopped if asked to stop."""
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
    """Open a local ArrayRecord file; yield a function that writes one record and raises OSError if that fails."""
    try:
        with contextlib.closing(ArrayRecordWriter(path, RECORD_OPTIONS)) as writer:
            yield writer.write
    except RuntimeError as error:  # the C++ library raises it for every error
        raise OSError(str(error).partition(";")[0]) from error


def stored_bytes(images: Images, row: int, name: str, settings: Settings) -> bytes:
    """Return the bytes to store for image `row`: its unchanged file, or a JPEG with the short side of the settings.

    Every image is decoded, so that all packed images can be read. Only larger images are encoded again.
    Raises BadImage with `name` if the image cannot be read.
    """
    data = images.encoded(row)
    pixels = read_image(data, name=name, decoding=settings.decoding)
    height, width = pixels.shape[:2]
    if not settings.short_side or min(height, width) <= settings.short_side:
        return data
    scale = settings.short_side / min(height, width)
    image = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Training resizes the image again. With Lanczos and full color resolution, the result is 6 dB closer to the resized
    # original than with the bilinear filter and 4:2:0, for 29 % more bytes.
    image.save(buffer, "JPEG", quality=settings.quality, subsampling="4:4:4")
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------------- workers
def write_shards(
    packer: Packer, shards: Sequence[Shard], processes: int, asked: threading.Event, manifest: dict[str, Any]
) -> None:
    """Write `shards` and add each to the manifest; return early if asked to stop.

    Raises UserError if a worker process was killed, and the errors of `Packer`.
    """
    total = sum(len(images) for images, _ in packer.sources.values())
    progress = Progress("pack", total, 1, first=total - sum(len(shard.rows) for shard in shards))
    context = multiprocessing.get_context("spawn")  # a forked process could deadlock on a lock of one of JAX's threads
    tally = Tally(context)
    executor, run = _workers(packer, tally, context, min(processes or cores(), len(shards)))
    shown, saved = 0, time.monotonic()
    try:
        pending = {_submitted(executor, run, shard): shard for shard in shards}
        while pending and not asked.is_set():
            finished, _ = wait(pending, timeout=UPDATE_EVERY, return_when=FIRST_COMPLETED)
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
        for worker in multiprocessing.active_children():  # the pool would wait for a worker that started while it broke
            worker.kill()
        raise UserError(
            "a packing process was killed, perhaps because memory ran out; lower --config.pack.processes and repeat "
            "the command to resume"
        ) from error
    finally:
        tally.stop.value = 1
        with contextlib.suppress(OSError):  # a broken pool may already have closed its pipes
            executor.shutdown(cancel_futures=True)
        progress.close()


def _submitted(executor: Executor, run: Callable, shard: Shard) -> Future:
    try:
        return executor.submit(run, shard)
    except (OSError, ValueError) as error:  # from the pipes of a pool that broke after the last shard
        raise BrokenProcessPool(str(error)) from error


def _workers(packer: Packer, tally: Tally, context, count: int) -> tuple[Executor, Callable[[Shard], dict | None]]:
    """Return an executor for shards, a thread of this process or `count` processes, and the function it runs."""
    # Not threads: reading a small photograph holds the GIL for a fifth of the time, which limits threads to five cores.
    if count <= 1:
        return ThreadPoolExecutor(1), functools.partial(packer, tally=tally)
    return ProcessPoolExecutor(count, context, _start_worker, (packer, tally)), _work


# Set once per worker process, so that the packer and the tally are not sent with every shard.
_in_worker: tuple[Packer, Tally] | None = None


def _start_worker(packer: Packer, tally: Tally) -> None:
    global _in_worker
    _in_worker = packer, tally
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(shard: Shard) -> dict[str, Any] | None:
    packer, tally = _in_worker
    return packer(shard, tally)
