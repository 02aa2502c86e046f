"""Any data set into a few large files (`--mode=pack`), for disks and object stores that are slow with many small ones.

`data/sources/packed.py` describes the files and reads them. A shard is written beside its place, or on local disk for
an object store, and appears under its name only when it is whole; `unfinished.json` lists the finished ones, so that
the same command goes on where it was stopped. What a shard holds does not depend on how many processes write.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath
from PIL import Image

from mlmoe_jax.data.duplicates import cores
from mlmoe_jax.data.images import BadImage, Images, read_image
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.sources.packed import FORMAT, MANIFEST, UNFINISHED
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.preemption import asked_to_stop
from mlmoe_jax.runtime.storage import Folder

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
    def of(cls, config) -> Settings:
        """Read a config; UserError for numbers out of range."""
        pack = config.pack
        if pack.short_side < 0 or pack.processes < 0 or pack.quality > 100:
            raise UserError("pack.short_side and pack.processes must be at least 0 and pack.quality at most 100")
        return cls(pack.shard_images, pack.short_side, pack.quality, config.data.bad_images == "skip")


def pack(config, output: str | os.PathLike) -> int:
    """Pack every split that `config.data` names into the folder, or gs:// address, `output`; return the exit code.

    Without a split of its own for validation (`data.val_fraction`) the training split is packed whole, so that the same
    config draws the same images from the packed one. 130: stopped on request; the same command goes on.
    Raises UserError for an unreadable image (unless `data.bad_images` is skip) and for a folder with something else.
    """
    from mlmoe_jax.runtime.progress import say  # brings JAX along, which worker processes do not need

    settings = Settings.of(config)
    splits = _open_splits(config)
    folder = Folder(epath.Path(output).expanduser())
    with _plain_errors(folder), folder.writing(), asked_to_stop() as asked:
        manifest = _resume(folder, _empty_manifest(config, settings, splits), settings)
        shards = [shard for split in splits for shard in _missing(manifest, split, settings)]
        folder.write_json(UNFINISHED, manifest)
        try:
            _pack_shards(Packer(str(folder), splits, settings), shards, config.pack.processes, asked, manifest)
        finally:
            folder.write_json(UNFINISHED, manifest)
        if asked.is_set():
            say(f"stopped with {folder} packed in part; the same command goes on from there")
            return 130
        _finish(folder, manifest, splits)
    _print_summary(folder, manifest, splits)
    return 0


def _open_splits(config) -> list[Split]:
    """Open the splits that `config.data` names, whole, with the classes of the training split."""
    data = config.data.copy_and_resolve_references()
    others = [data.val_split if not data.val_fraction else "", *data.test_splits]
    data.val_fraction = 0.0
    train = open_split(data, data.train_split)
    names = [name for name in dict.fromkeys(others) if name not in ("", data.train_split)]
    splits = [train, *(open_split(data, name, classes=train.classes) for name in names)]
    for split in splits:
        if not len(split):
            raise UserError(f"split {split.name} has no images; check the data set or name another split")
    return splits


@contextlib.contextmanager
def _plain_errors(folder: Folder) -> Iterator[None]:
    """Turn what goes wrong with the output folder into one sentence."""
    try:
        yield
    except ImportError as error:  # what etils needs for object stores is installed on demand
        raise UserError(f"cannot write to {folder}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to {folder}: {reason}; put that right and give the command again") from error


# ----------------------------------------------------------------------------------------------------------- manifest
def _empty_manifest(config, settings: Settings, splits: Sequence[Split]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": config.data.name,
        "settings": {key: value for key, value in asdict(settings).items() if key != "skip_bad"},
        "classes": list(splits[0].classes),
        "splits": {
            split.name: {
                "images": 0,
                "source_sha256": _fingerprint(split),
                "labels": None,
                "shards": [None] * -(-len(split) // settings.shard_images),
            }
            for split in splits
        },
    }


def _fingerprint(split: Split) -> str:
    """Return a sha256 over the ids and the labels, in their order."""
    digest = hashlib.sha256("\0".join(split.ids).encode())
    digest.update(np.ascontiguousarray(split.labels, np.int8).tobytes())
    return digest.hexdigest()


def _resume(folder: Folder, wanted: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return `wanted` with the shards that are in the folder already; UserError where it holds something else."""
    found = next((name for name in (UNFINISHED, MANIFEST) if (folder / name).exists()), None)
    if found is None:
        there = folder.path.iterdir() if folder.path.is_dir() else ()  # an empty folder is none on an object store
        if there := sorted(path.name for path in there if not path.name.startswith(".")):
            raise UserError(f"{folder} holds other files, such as {there[0]}; give a new or empty folder as --output")
        return wanted
    before = folder.read_json(found)
    _require_same(folder, before, wanted)
    for name in wanted["splits"].keys() & before["splits"].keys():
        of_split = before["splits"][name]
        of_split["shards"] = [
            entry if entry and _is_there(folder, entry) and (settings.skip_bad or not entry["left_out"]) else None
            for entry in of_split["shards"]
        ]
    return wanted | {"splits": wanted["splits"] | before["splits"]}


def _require_same(folder: Folder, before: dict[str, Any], wanted: dict[str, Any]) -> None:
    if before.get("format") != FORMAT:
        raise UserError(f"{folder} was packed by another version of mlmoe_jax; give another --output")
    if before["source"] != wanted["source"]:
        raise UserError(f"{folder} holds images of {before['source']}, not {wanted['source']}; give another --output")
    for key, value in wanted["settings"].items():
        if before["settings"][key] != value:
            raise UserError(
                f"{folder} was packed with pack.{key}={before['settings'][key]}, not {value}; give that value, or "
                "another --output"
            )
    changed = [
        f"split {name}"
        for name, of_split in wanted["splits"].items()
        if name in before["splits"] and before["splits"][name]["source_sha256"] != of_split["source_sha256"]
    ]
    if before["classes"] != wanted["classes"]:
        changed.insert(0, "the classes")
    if changed:
        raise UserError(
            f"{folder} was packed when {wanted['source']} had other images or labels ({', '.join(changed)}); give "
            "another --output"
        )


def _is_there(folder: Folder, entry: dict[str, Any]) -> bool:
    path = folder / entry["file"]
    return path.exists() and path.stat().length == entry["bytes"]


def _finish(folder: Folder, manifest: dict[str, Any], splits: Sequence[Split]) -> None:
    """Write the labels of each split and then the manifest, which makes the folder a packed data set."""
    for split in splits:
        of_split = manifest["splits"][split.name]
        kept = np.ones(len(split), bool)
        kept[[item["row"] for entry in of_split["shards"] for item in entry["left_out"]]] = False
        if not kept.any():
            raise UserError(f"no image of split {split.name} can be read; see {folder / UNFINISHED} for each")
        file = f"{_stem(split.name)}.npz"
        ids = [name.encode() for name, keep in zip(split.ids, kept, strict=True) if keep]
        folder.write_npz(file, labels=split.labels[kept].astype(np.int8), ids=np.array(ids))
        content = (folder / file).read_bytes()
        of_split["images"] = int(kept.sum())
        of_split["labels"] = {"file": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    # An earlier command may have been stopped within a split that this one does not name.
    whole = {name: of_split for name, of_split in manifest["splits"].items() if of_split["labels"]}
    folder.write_json(MANIFEST, manifest | {"splits": whole})
    if len(whole) == len(manifest["splits"]):
        (folder / UNFINISHED).unlink()


def _print_summary(folder: Folder, manifest: dict[str, Any], splits: Sequence[Split]) -> None:
    for split in splits:
        of_split = manifest["splits"][split.name]
        size = sum(entry["bytes"] for entry in of_split["shards"]) / 1e6
        print(f"{split.name}: {of_split['images']:,} images in {len(of_split['shards']):,} files, {size:,.1f} MB")
        if left_out := len(split) - of_split["images"]:
            print(f"  {left_out:,} unreadable images left out, listed in {MANIFEST}")
    print(f"to use it: --config.data.name=packed --config.data.root={folder}")


def _stem(split: str) -> str:
    return quote(split, safe="")  # names such as train[:50%] are for readers of the manifest, not for file systems


# ------------------------------------------------------------------------------------------------------------- shards
@dataclass(frozen=True)
class Shard:
    """A shard to write: the images `rows` of a split, as number `number` of its shards."""

    split: str
    number: int
    file: str
    rows: range


def _missing(manifest: dict[str, Any], split: Split, settings: Settings) -> Iterator[Shard]:
    entries = manifest["splits"][split.name]["shards"]
    for number, entry in enumerate(entries):
        if entry is None:
            first = number * settings.shard_images
            file = f"{_stem(split.name)}-{number:05d}-of-{len(entries):05d}.arrayrecord"
            yield Shard(split.name, number, file, range(first, min(first + settings.shard_images, len(split))))


class Tally:
    """What the workers tell, the number of images done, and what they are told, to stop."""

    def __init__(self, context):
        self.done, self.stop = context.Value("q", 0), context.Value("b", 0)


class Packer:
    """Writes one shard after the other; picklable, for worker processes."""

    def __init__(self, folder: str, splits: Sequence[Split], settings: Settings):
        self.folder, self.settings = folder, settings
        self.sources: dict[str, tuple[Images, Sequence[str]]] = {s.name: (s.images, s.ids) for s in splits}

    def __call__(self, shard: Shard, tally: Tally) -> dict[str, Any] | None:
        """Write a shard and return its entry for the manifest; None when told to stop.

        Raises BadImage for an image that cannot be read, unless those are left out, and OSError where it cannot write.
        """
        folder = Folder(self.folder)
        with tempfile.TemporaryDirectory() as elsewhere:
            # Beside its place, so that renaming is atomic.
            temporary = f"{folder}/.{shard.file}.tmp" if folder.is_local else f"{elsewhere}/{shard.file}"
            try:
                left_out = self._write(shard, temporary, tally)
                if left_out is None:
                    return None
                with open(temporary, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                    os.fsync(file.fileno())
                size = os.path.getsize(temporary)
                if folder.is_local:
                    os.replace(temporary, folder / shard.file)
                else:
                    epath.Path(temporary).copy(folder / shard.file, overwrite=True)
            finally:
                epath.Path(temporary).unlink(missing_ok=True)
        records = len(shard.rows) - len(left_out)
        return {"file": shard.file, "records": records, "bytes": size, "sha256": sha256, "left_out": left_out}

    def _write(self, shard: Shard, path: str, tally: Tally) -> list[dict[str, Any]] | None:
        """Write the images of a shard to a local file; return what was left out, None when told to stop."""
        images, ids = self.sources[shard.split]
        left_out = []
        with _record_file(path) as write:
            for row in shard.rows:
                if tally.stop.value:
                    return None
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
def _pack_shards(packer: Packer, shards: Sequence[Shard], processes: int, asked: threading.Event, manifest) -> None:
    """Write `shards` and enter each into the manifest; return early when asked to stop."""
    from mlmoe_jax.runtime.progress import Progress

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
