"""Pack a data set into a few large files (`--mode=pack`), for storage that is slow with many small files.

`data/sources/packed.py` describes and reads these files. A shard is written to a temporary file in the same folder, or
on local disk for an object store, and gets its name only when it is complete. `unfinished.json` lists the finished
shards, so that the same command resumes after an interruption. The content of a shard does not depend on the number of
processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from mlmoe_jax.data.images import Decoding
from mlmoe_jax.data.shards import QUALITY, Packer, Shard, write_shards
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.sources.packed import FORMAT, MANIFEST, UNFINISHED, PackedFile
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import INTERRUPTED, UserError
from mlmoe_jax.runtime.files import MOST_DATA
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.preemption import stop_requests
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Column, Outcome, Table

SHARD_IMAGES = 1024
SAVE_EVERY = 5.0  # seconds; object stores limit how often an object may be replaced


def pack(config: ConfigDict, output: str | os.PathLike) -> Outcome:
    """Pack every split of `config.data` into the folder, or gs:// address, `output`; return a table of the splits.

    The exit code is 130 if packing was stopped on request; the same command resumes it. Raises UserError for an
    unreadable image (unless `data.bad_images` is skip) and for a folder with other content.
    """
    splits = open_whole(config)
    folder = Folder(epath.Path(output).expanduser())
    folder.require_place()
    with folder.writing(), stop_requests() as stop:
        manifest = _resume(folder, _empty_manifest(config, splits), config)
        folder.write_json(UNFINISHED, manifest)
        try:
            _write_missing(folder, manifest, splits, config, stop)
        finally:
            folder.write_json(UNFINISHED, manifest)
        if stop.is_set():
            status(f"packing into {folder} was stopped; the same command resumes it")
            return Outcome(exit_code=INTERRUPTED)
        _finish(folder, manifest, splits)
    return Outcome([_summary_table(folder, manifest, splits)])


def open_whole(config: ConfigDict) -> list[Split]:
    """Open all splits of `config.data`, complete, with the classes of the training split.

    Images of `data.val_fraction` stay in the training split, so that the same config holds them out again.
    """
    data_config = config.data.copy_and_resolve_references()
    others = [data_config.val_split if not data_config.val_fraction else "", *data_config.test_splits]
    data_config.val_fraction = 0.0
    return list(open_splits(data_config, others, keep_missing=True).values())


def _write_missing(
    folder: Folder, manifest: dict[str, Any], splits: Sequence[Split], config: ConfigDict, stop: threading.Event
) -> None:
    """Write the shards that the manifest lacks, and add their entries; return early after a request to stop."""
    shards = [shard for split in splits for shard in _missing(manifest, split)]
    sources = {split.name: (split.images, split.ids) for split in splits}
    skip, decoding = config.data.bad_images == "skip", Decoding.of(config.data)
    packer = Packer(str(folder), sources, config.pack.short_side, skip, decoding)
    workers = config.data.workers if config.data.workers >= 0 else cores()
    progress, saved = Progress("pack", len(shards), SHARD_IMAGES), time.monotonic()
    with contextlib.closing(progress), contextlib.closing(write_shards(packer, shards, workers)) as entries:
        for shard, entry in entries:
            manifest["splits"][shard.split]["shards"][shard.number] = entry
            progress.advance()
            if stop.is_set():
                return
            if time.monotonic() - saved > SAVE_EVERY:
                folder.write_json(UNFINISHED, manifest)
                saved = time.monotonic()


# ------------------------------------------------------------------------------------------------------------ manifest
def _empty_manifest(config: ConfigDict, splits: Sequence[Split]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": config.data.name,
        "settings": {"shard_images": SHARD_IMAGES, "short_side": config.pack.short_side, "quality": QUALITY},
        "classes": list(splits[0].classes),
        "splits": {
            split.name: {
                "images": 0,
                "source_sha256": split.fingerprint,
                "labels": None,
                "shards": [None] * -(-len(split) // SHARD_IMAGES),
            }
            for split in splits
        },
    }


def _resume(folder: Folder, manifest: dict[str, Any], config: ConfigDict) -> dict[str, Any]:
    """Return a new manifest with the shards that are in the folder; UserError if the folder has other content."""
    name = next((name for name in (UNFINISHED, MANIFEST) if (folder / name).exists()), None)
    if name is None:
        entries = folder.path.iterdir() if folder.path.is_dir() else ()  # an object store has no empty folders
        if names := sorted(path.name for path in entries if not path.name.startswith(".")):
            raise UserError(f"{folder} contains other files, such as {names[0]}; set --output to a new or empty folder")
        return manifest
    before, skip = folder.read_json(name), config.data.bad_images == "skip"
    with folder.reading(name):
        _require_same(folder, before, manifest)
        for split in manifest["splits"].keys() & before["splits"].keys():
            before["splits"][split]["shards"] = [
                entry if entry and _is_there(folder, entry) and (skip or not entry["left_out"]) else None
                for entry in before["splits"][split]["shards"]
            ]
        return manifest | {"splits": manifest["splits"] | before["splits"]}


def _require_same(folder: Folder, before: dict[str, Any], now: dict[str, Any]) -> None:
    def identity(manifest: dict[str, Any]) -> dict[str, Any]:
        sums = {
            f"images, labels or groups of split {name}": s["source_sha256"] for name, s in manifest["splits"].items()
        }
        settings = {f"pack.{key}": value for key, value in manifest["settings"].items()}
        return {key: manifest[key] for key in ("format", "source", "classes")} | settings | sums

    then = identity(before)
    if changed := [key for key, value in identity(now).items() if then.get(key, value) != value]:
        raise UserError(f"{folder} was packed with other {', '.join(changed)}; set another --output")


def _is_there(folder: Folder, entry: dict[str, Any]) -> bool:
    item = PackedFile.of(entry)
    path = folder / item.file
    return path.exists() and path.stat().length == item.bytes


def _finish(folder: Folder, manifest: dict[str, Any], splits: Sequence[Split]) -> None:
    """Write the labels of each split and then the manifest, which makes the folder a packed data set."""
    for split in splits:
        entry = manifest["splits"][split.name]
        stored = np.ones(len(split), bool)
        stored[[item["row"] for shard in entry["shards"] for item in shard["left_out"]]] = False
        if not stored.any():
            raise UserError(f"no image of split {split.name} can be read; the reasons are in {folder / UNFINISHED}")
        file = f"{_stem(split.name)}.npz"
        texts = {"ids": split.ids} | ({} if split.groups is None else {"groups": split.groups})
        coded = {
            key: np.array([names[row].encode(errors="surrogatepass") for row in np.flatnonzero(stored)])
            for key, names in texts.items()
        }
        folder.write_npz(file, labels=split.labels[stored].astype(np.int8), **coded)
        content = folder.read_bytes(file, MOST_DATA)
        entry["images"] = int(stored.sum())
        entry["labels"] = {"file": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    # An earlier command may have been interrupted in a split that this command does not have.
    complete = {name: entry for name, entry in manifest["splits"].items() if entry["labels"]}
    folder.write_json(MANIFEST, manifest | {"splits": complete})
    if len(complete) == len(manifest["splits"]):
        (folder / UNFINISHED).unlink()


def _summary_table(folder: Folder, manifest: dict[str, Any], splits: Sequence[Split]) -> Table:
    columns = ["split", *(Column(name, "{:,}".format) for name in ("images", "files")), Column("MB", "{:,.1f}".format)]
    rows, notes = [], []
    for split in splits:
        entry = manifest["splits"][split.name]
        size = sum(shard["bytes"] for shard in entry["shards"])
        rows.append([split.name, entry["images"], len(entry["shards"]), size / 1e6])
        if left_out := len(split) - entry["images"]:
            notes.append(f"{split.name}: {left_out:,} unreadable images left out, listed in {MANIFEST}")
    notes.append(f"to use it: --config.data.name=packed --config.data.root={folder}")
    return Table(columns, rows, notes=notes)


def _missing(manifest: dict[str, Any], split: Split) -> Iterator[Shard]:
    entries = manifest["splits"][split.name]["shards"]
    for number, entry in enumerate(entries):
        if entry is None:
            first = number * SHARD_IMAGES
            file = f"{_stem(split.name)}-{number:05d}-of-{len(entries):05d}.arrayrecord"
            yield Shard(split.name, number, file, range(first, min(first + SHARD_IMAGES, len(split))))


def _stem(split: str) -> str:
    return quote(split, safe="")  # not all file systems accept names such as train[:50%]/a
