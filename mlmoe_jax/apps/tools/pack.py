"""Pack a data set into a few large files (`mlmoe pack`), for storage that is slow with many small files.

`data/sources/packed.py` describes and reads these files. Each image is read once, in the order of its split. A shard is
first written to a temporary file, in the output folder or, for an object store, on local disk. When the shard is
complete, it is renamed, and then its description is written. Therefore, the same command resumes after an interruption,
and writes the shards again whose images have changed. An uninterrupted command gives an equal result, for
any number of processes.
"""

import contextlib
import hashlib
import itertools
import json
import logging
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

from mlmoe_jax.apps.tools.shards import JPEG_QUALITY, SHARD, SIDECAR, Description, Shard, ShardWriter, write_shards
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.images import describe_frames
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.sources.packed import MANIFEST, SOURCE, STREAMS
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import warn_dark
from mlmoe_jax.data.usage import unused_input
from mlmoe_jax.errors import INTERRUPTED, UserError
from mlmoe_jax.runtime.files import file_sha256
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.preemption import stop_requests
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Column, Outcome, Table

_logger = logging.getLogger(__name__)

SHARD_IMAGES = 1024


def pack(config: ConfigDict, output: str | os.PathLike) -> Outcome:
    """Pack every split of `config.data` into a few large files, and return a table of the splits to print.

    `output` is a folder, or an address such as gs://bucket/folder. The exit code is 130 if a signal stopped packing.
    The same command then resumes it. Raises UserError if an image is unreadable and `data.bad_images` is not skip, or
    the folder has other content.
    """
    splits = open_whole(config)
    for sentence in unused_input(account for split in splits for account in split.usage):
        _logger.warning(sentence)
    folder = Folder(epath.Path(output).expanduser())
    folder.require_creatable()
    with folder.writing(), stop_requests() as stop:
        manifest = _start_manifest(folder, config, splits)
        plans = [_plan_shards(split, manifest["settings"]) for split in splits]
        described = _write(folder, list(itertools.chain(*plans)), config, stop)
        if stop.is_set():
            status(f"packing into {folder} was stopped; the same command resumes it")
            return Outcome(exit_code=INTERRUPTED)
        results = [(split, [described[shard.key] for shard in plan]) for split, plan in zip(splits, plans, strict=True)]
        for split, descriptions in results:
            manifest["splits"][split.name] = _finish_split(folder, split, descriptions)
        folder.write_json(MANIFEST, manifest)
        _remove_unlisted(folder, manifest)
    return Outcome([_summary_table(results), f"to use it: --config.data.name=packed --config.data.root={folder}"])


def open_whole(config: ConfigDict) -> list[Split]:
    """Open all splits of `config.data` with all their images, and with the classes of the training split.

    The images of `data.val_fraction` stay in the training split. If the packed data is used with an equal config, they
    are held out again.
    """
    data_config = config.data.copy_and_resolve_references()
    others = [data_config.val_split if not data_config.val_fraction else "", *data_config.test_splits]
    data_config.val_fraction = 0.0
    return list(open_splits(data_config, others, keep_missing=True).values())


# ---------------------------------------------------------------------------------------------------------- the shards
def _plan_shards(split: Split, settings: Mapping[str, Any]) -> list[Shard]:
    """Return the shards of a split. Each shard has SHARD_IMAGES images; the last may have fewer.

    Their keys are digests of the settings, and of the names and the versions of the images.
    """
    shards = []
    with ThreadPoolExecutor(STREAMS) as pool:  # the files may be in an object store
        for number, start in enumerate(range(0, len(split), SHARD_IMAGES)):
            rows = np.arange(start, min(start + SHARD_IMAGES, len(split)))
            images, ids = split.images.take(rows), [split.ids[row] for row in rows]
            versions = list(pool.map(images.stamp, range(len(ids))))
            digest = hashlib.sha256(json.dumps([settings, ids, versions]).encode()).hexdigest()
            shards.append(Shard(f"{_file_stem(split.name)}-{number:05d}", images, ids, start, digest))
    return shards


def _write(
    folder: Folder, shards: Sequence[Shard], config: ConfigDict, stop: threading.Event
) -> dict[str, Description]:
    """Write the incomplete shards until `stop` is set. Return a description of each shard by its key."""
    data_config = config.data
    skip_bad, decoding = data_config.bad_images == "skip", Decoding.from_config(data_config)
    writer = ShardWriter(str(folder), config.pack.short_side, skip_bad, decoding)
    described = _find_complete(folder, skip_bad)
    missing = [shard for shard in shards if shard.key not in described]
    workers = data_config.workers if data_config.workers >= 0 else cores()
    progress, written = Progress("pack", len(missing), SHARD_IMAGES), write_shards(writer, missing, workers)
    dark = False
    with contextlib.closing(progress), contextlib.closing(written):
        for description in written:
            described[description["key"]] = description
            dark = dark or warn_dark(description["brightest"], description["records"], description["file"], decoding)
            progress.advance()
            if stop.is_set():
                break
    return described


def _find_complete(folder: Folder, skip_bad: bool) -> dict[str, Description]:
    """Return the description of each complete shard in the folder by its key.

    If `skip_bad`, a shard may lack images that could not be read.
    """
    described = {}
    for name in _file_names(folder):
        if not name.endswith(f"{SHARD}{SIDECAR}"):
            continue
        description, path = folder.read_json(name), folder / name.removesuffix(SIDECAR)
        whole = path.exists() and path.stat().length == description["bytes"]
        if whole and (skip_bad or not description["left_out"]):
            described[description["key"]] = description
    return described


def _remove_unlisted(folder: Folder, manifest: Mapping[str, Any]) -> None:
    """Remove the shards of images that have changed, or that the data set no longer has."""
    listed = {shard["file"] for split in manifest["splits"].values() for shard in split["shards"]}
    for name in _file_names(folder):
        if SHARD in name and name.removesuffix(SIDECAR) not in listed:
            (folder / name).unlink()


def _file_names(folder: Folder) -> list[str]:
    files = folder.path.iterdir() if folder.path.is_dir() else ()  # an object store has no empty folders
    return sorted(path.name for path in files)


# -------------------------------------------------------------------------------------------------------- the manifest
def _start_manifest(folder: Folder, config: ConfigDict, splits: Sequence[Split]) -> dict[str, Any]:
    """Return the manifest in the folder, or a new one without splits.

    Raises UserError if the folder was packed with other settings or from other images, or has other content.
    """
    settings = {SOURCE: config.data.name, "pack.short_side": config.pack.short_side, "quality": JPEG_QUALITY}
    settings |= {f"data.{key}": value for key, value in asdict(Decoding.from_config(config.data)).items()}
    if not (folder / MANIFEST).exists():
        _require_no_others(folder)
        return {"settings": settings, "splits": {}}
    manifest = folder.read_json(MANIFEST, lambda content: {key: content[key] for key in ("settings", "splits")})
    stored, entries = manifest["settings"], manifest["splits"]
    others = [
        f"{key}={stored.get(key)} instead of {value}" for key, value in settings.items() if stored.get(key) != value
    ]
    for split in splits:
        if split.name in entries and entries[split.name]["first"] not in split.ids:
            others.append(f"other images, such as {entries[split.name]['first']}")
    if others:
        raise UserError(f"{folder} was packed with {', '.join(others)}; set another --output")
    return manifest


def _require_no_others(folder: Folder) -> None:
    """Raise UserError if a folder without a manifest has files, but no shard of an unfinished packing."""
    names = [name for name in _file_names(folder) if not name.startswith(".")]
    if names and not any(name.endswith(SHARD) for name in names):
        raise UserError(f"{folder} contains other files, such as {names[0]}; set --output to a new or empty folder")


def _finish_split(folder: Folder, split: Split, descriptions: Sequence[Description]) -> dict[str, Any]:
    """Write the file of labels of a split with complete shards, and return its entry of the manifest."""
    left_out = [item["row"] for shard in descriptions for item in shard["left_out"]]
    kept = split.take(np.delete(np.arange(len(split)), left_out), split.name) if left_out else split
    if not len(kept):
        raise UserError(f"no image of split {split.name} can be read; the reasons are beside the shards in {folder}")
    arrays = {"labels": np.asarray(kept.labels, np.int8), "ids": _join_texts(kept.ids)}
    if kept.groups is not None:
        arrays["groups"] = _join_texts(kept.groups)
    file = f"{_file_stem(split.name)}.npz"
    folder.write_npz(file, **arrays)
    labels = {"file": file, "bytes": (folder / file).stat().length, "sha256": file_sha256(folder / file)}
    shards = [{key: shard[key] for key in ("file", "records", "bytes", "sha256")} for shard in descriptions]
    return {"first": split.ids[0], "classes": list(split.classes), "labels": labels, "shards": shards}


def _summary_table(results: Sequence[tuple[Split, Sequence[Description]]]) -> Table:
    columns = ["split", "images", "files", Column("MB", "{:,.1f}".format)]
    rows, notes = [], []
    for split, descriptions in results:
        images = sum(shard["records"] for shard in descriptions)
        rows.append([split.name, images, len(descriptions), sum(shard["bytes"] for shard in descriptions) / 1e6])
        if left_out := len(split) - images:
            notes.append(f"{split.name}: {left_out:,} unreadable images left out, listed beside the shards")
        if frames := [name for shard in descriptions for name in shard["several_frames"]]:
            notes.append(f"split {split.name} {describe_frames(frames)}")
    return Table(columns, rows, notes=notes)


def _join_texts(texts: Sequence[str]) -> np.ndarray:
    return np.frombuffer("\0".join(texts).encode(errors="surrogatepass"), np.uint8)


def _file_stem(split: str) -> str:
    return quote(split, safe="")  # not all file systems accept names such as train[:50%]/a
