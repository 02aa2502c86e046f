"""Pack a data set into a few large files (`mlmoe pack`), for storage that is slow with many small files.

`data/sources/packed.py` describes and reads these files. A shard is first written to a temporary file, in the output
folder or, for an object store, on local disk. When the shard is complete, it is renamed, and then a sidecar file with
its description is written. Therefore, the same command resumes after an interruption, and writes the shards again whose
images have changed. The content of a shard does not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.shards import JPEG_QUALITY, Shard, ShardWriter, is_version, write_shards
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.sources.packed import MANIFEST, STREAMS
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import sample_images, warn_unused
from mlmoe_jax.errors import INTERRUPTED, UserError
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.preemption import stop_requests
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import quantity

SHARD_IMAGES = 1024


def pack(config: ConfigDict, output: str | os.PathLike) -> Outcome:
    """Pack every split of `config.data` into a few large files, and return a table of the splits to print.

    `output` is a folder, or an address such as gs://bucket/folder. The exit code is 130 if a signal stopped packing.
    The same command then resumes it. Raises UserError if an image is unreadable and `data.bad_images` is not skip, or
    the folder has other content.
    """
    splits = open_whole(config)
    folder = Folder(epath.Path(output).expanduser())
    folder.require_creatable()
    with folder.writing(), stop_requests() as stop:
        manifest = _start_manifest(folder, config, splits)
        shards = {split.name: _plan_shards(split) for split in splits}
        entries = _find_complete(folder, shards, manifest, skip_bad=config.data.bad_images == "skip")
        missing = [shard for planned in shards.values() for shard in planned if shard.file not in entries]
        entries |= _write(folder, missing, config, stop)
        if stop.is_set():
            status(f"packing into {folder} was stopped; the same command resumes it")
            return Outcome(exit_code=INTERRUPTED)
        for split in splits:
            split_entries = [entries[shard.file] for shard in shards[split.name]]
            manifest["splits"][split.name] = _finish_split(folder, split, split_entries)
        folder.write_json(MANIFEST, manifest)
    table = _summary_table(manifest, splits)
    return Outcome([table, f"to use it: --config.data.name=packed --config.data.root={folder}"])


def open_whole(config: ConfigDict) -> list[Split]:
    """Open all splits of `config.data` with all their images, and with the classes of the training split.

    The images of `data.val_fraction` stay in the training split. If the packed data is used with an equal config, they
    are held out again.
    """
    data_config = config.data.copy_and_resolve_references()
    others = [data_config.val_split if not data_config.val_fraction else "", *data_config.test_splits]
    data_config.val_fraction = 0.0
    splits = list(open_splits(data_config, others, keep_missing=True).values())
    warn_unused(splits)
    for split in splits:
        sample_images(split.images, f"split {split.name}", Decoding.from_config(data_config))
    return splits


# ---------------------------------------------------------------------------------------------------------- the shards
def _plan_shards(split: Split) -> list[Shard]:
    """Return the shards of a split. Each shard has SHARD_IMAGES images; the last may have fewer."""
    starts, stem, fingerprint = range(0, len(split), SHARD_IMAGES), _file_stem(split.name), split.fingerprint
    shards = []
    for number, start in enumerate(starts):
        rows = np.arange(start, min(start + SHARD_IMAGES, len(split)))
        file = f"{stem}-{number:05d}-of-{len(starts):05d}.arrayrecord"
        shards.append(Shard(file, split.images.take(rows), [split.ids[row] for row in rows], start, fingerprint))
    return shards


def _find_complete(
    folder: Folder, shards: Mapping[str, Sequence[Shard]], manifest: dict[str, Any], *, skip_bad: bool
) -> dict[str, dict[str, Any]]:
    """Return file name -> entry of the manifest for each shard in the folder that need not be written.

    All other shards are missing, are incomplete, or have changed images. Their splits are removed from `manifest` and
    from its file. If `skip_bad`, a shard may lack images that could not be read; otherwise such a shard is written
    again.
    """
    entries, changed = {}, []
    for split, planned in shards.items():
        for shard in planned:
            entry, rows = _read_entry(folder, shard)
            changed += [shard.ids[row] for row in rows]
            if entry and not rows and (skip_bad or not entry["left_out"]):
                entries[shard.file] = entry
            elif manifest["splits"].pop(split, None):
                folder.write_json(MANIFEST, manifest)
    if changed:
        count = quantity(len(changed), "image")
        status(f"packing {count} again that changed since the last packing, such as {changed[0]}")
    return entries


def _write(
    folder: Folder, shards: Sequence[Shard], config: ConfigDict, stop: threading.Event
) -> dict[str, dict[str, Any]]:
    """Write shards, until `stop` is set. Return file name -> entry of the manifest for each shard that is complete."""
    writer = ShardWriter(
        str(folder), config.pack.short_side, config.data.bad_images == "skip", Decoding.from_config(config.data)
    )
    workers = config.data.workers if config.data.workers >= 0 else cores()
    progress, written = Progress("pack", len(shards), SHARD_IMAGES), write_shards(writer, shards, workers)
    entries = {}
    with contextlib.closing(progress), contextlib.closing(written):
        for entry in written:
            entries[entry["file"]] = entry
            progress.advance()
            if stop.is_set():
                break
    return entries


def _read_entry(folder: Folder, shard: Shard) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the manifest entry of a shard, and the positions of the images that have changed since it was written.

    The entry is None if the shard is missing or incomplete. UserError if the shard was packed from a split with other
    images, labels or groups.
    """
    if not (folder / shard.sidecar).exists():
        return None, []
    source, versions, entry = folder.read_json(
        shard.sidecar, lambda content: [content[key] for key in ("source_sha256", "versions", "entry")]
    )
    if source != shard.source_sha256:
        raise UserError(f"{folder} was packed with other images, labels or groups ({shard.file}); set another --output")
    path = folder / shard.file
    if not path.exists() or path.stat().length != entry["bytes"]:
        return None, []
    with ThreadPoolExecutor(STREAMS) as pool:  # the files may be in an object store
        same = pool.map(functools.partial(is_version, shard.images), range(len(shard.ids)), versions)
        return entry, [row for row, is_same in enumerate(same) if not is_same]


# -------------------------------------------------------------------------------------------------------- the manifest
def _start_manifest(folder: Folder, config: ConfigDict, splits: Sequence[Split]) -> dict[str, Any]:
    """Return the manifest in the folder. If the folder is new, write a manifest without splits first.

    Raises UserError if the folder was packed from another data set or with other settings, or has other content.
    """
    manifest = {
        "source": config.data.name,
        "settings": {
            "shard_images": SHARD_IMAGES,
            "pack.short_side": config.pack.short_side,
            "quality": JPEG_QUALITY,
            **{f"data.{key}": value for key, value in asdict(Decoding.from_config(config.data)).items()},
        },
        "classes": list(splits[0].classes),
        "splits": {},
    }
    if (folder / MANIFEST).exists():
        stored = folder.read_json(MANIFEST, lambda content: {key: content[key] for key in manifest})
        changed = [f"other {key}" for key in ("source", "classes") if stored[key] != manifest[key]]
        changed += [
            f"{key}={stored['settings'].get(key)} instead of {value}"
            for key, value in manifest["settings"].items()
            if stored["settings"].get(key) != value
        ]
        if changed:
            raise UserError(f"{folder} was packed with {', '.join(changed)}; set another --output")
        return stored
    files = folder.path.iterdir() if folder.path.is_dir() else ()  # an object store has no empty folders
    if names := sorted(path.name for path in files if not path.name.startswith(".")):
        raise UserError(f"{folder} contains other files, such as {names[0]}; set --output to a new or empty folder")
    folder.write_json(MANIFEST, manifest)
    return manifest


def _finish_split(folder: Folder, split: Split, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the file of labels of a split with complete shards, and return its manifest entry from their `entries`."""
    left_out = [item["row"] for shard in entries for item in shard["left_out"]]
    rows = np.delete(np.arange(len(split)), left_out)
    if not len(rows):
        raise UserError(f"no image of split {split.name} can be read; the reasons are beside the shards in {folder}")
    arrays = {"labels": split.labels[rows].astype(np.int8), "ids": _encode_texts(split.ids, rows)}
    if split.groups is not None:
        arrays["groups"] = _encode_texts(split.groups, rows)
    file = f"{_file_stem(split.name)}.npz"
    folder.write_npz(file, **arrays)
    content = folder.read_bytes(file)
    labels = {"file": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {"images": len(rows), "labels": labels, "shards": list(entries)}


def _summary_table(manifest: dict[str, Any], splits: Sequence[Split]) -> Table:
    columns = ["split", *(Column(name, "{:,}".format) for name in ("images", "files")), Column("MB", "{:,.1f}".format)]
    rows, notes = [], []
    for split in splits:
        entry = manifest["splits"][split.name]
        size = sum(shard["bytes"] for shard in entry["shards"])
        rows.append([split.name, entry["images"], len(entry["shards"]), size / 1e6])
        if left_out := len(split) - entry["images"]:
            notes.append(f"{split.name}: {left_out:,} unreadable images left out, listed in {MANIFEST}")
    return Table(columns, rows, notes=notes)


def _encode_texts(texts: Sequence[str], rows: np.ndarray) -> np.ndarray:
    return np.array([texts[row].encode(errors="surrogatepass") for row in rows])


def _file_stem(split: str) -> str:
    return quote(split, safe="")  # not all file systems accept names such as train[:50%]/a
