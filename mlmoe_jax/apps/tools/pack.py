"""Pack a data set into a few large files (`--mode=pack`), for storage that is slow with many small files.

`data/sources/packed.py` describes and reads these files. A shard is written to a temporary file in the same folder, or
on local disk for an object store, and gets its name only when it is complete. `unfinished.json` lists the finished
shards, so that the same command resumes an interrupted one. The content of a shard does not depend on the number of
processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from mlmoe_jax.data.shards import Packer, Settings, Shard, write_shards
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.sources.packed import FORMAT, MANIFEST, UNFINISHED, PackedFile
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import files
from mlmoe_jax.runtime.files import MOST_DATA
from mlmoe_jax.runtime.preemption import asked_to_stop
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import Folder


def pack(config: ConfigDict, output: str | os.PathLike) -> int:
    """Pack every split that `config.data` names into the folder, or gs:// address, `output`; return the exit code.

    If `data.val_fraction` holds out images for validation, the training split is packed whole, so that the same config
    holds out the same images of the packed data set. The exit code is 130 if packing was stopped on request; the same
    command resumes it.
    Raises UserError for an unreadable image (unless `data.bad_images` is skip) and for a folder with other content.
    """
    settings = Settings.of(config)
    splits = _open_splits(config)
    folder = Folder(epath.Path(output).expanduser())
    with _plain_errors(folder), folder.writing(), asked_to_stop() as asked:
        manifest = _resume(folder, _empty_manifest(config, settings, splits), settings)
        shards = [shard for split in splits for shard in _missing(manifest, split, settings)]
        folder.write_json(UNFINISHED, manifest)
        try:
            write_shards(Packer(str(folder), splits, settings), shards, config.pack.processes, asked, manifest)
        finally:
            folder.write_json(UNFINISHED, manifest)
        if asked.is_set():
            status(f"packing into {folder} was stopped; the same command resumes it")
            return 130
        _finish(folder, manifest, splits)
    _print_summary(folder, manifest, splits)
    return 0


def _open_splits(config: ConfigDict) -> list[Split]:
    """Open all splits that `config.data` names, complete, with the classes of the training split."""
    data_config = config.data.copy_and_resolve_references()
    others = [data_config.val_split if not data_config.val_fraction else "", *data_config.test_splits]
    data_config.val_fraction = 0.0
    splits = list(open_splits(data_config, others, keep_missing=True).values())
    for split in splits:
        if not len(split):
            raise UserError(f"split {split.name} has no images; check the data set or name another split")
    return splits


@contextlib.contextmanager
def _plain_errors(folder: Folder) -> Iterator[None]:
    """Convert errors of the output folder to UserError."""
    try:
        yield
    except ImportError as error:  # etils imports the packages for object stores on demand
        raise UserError(f"cannot write to {folder}: {error}") from error
    except OSError as error:
        if full := files.no_room(error, folder):
            raise full from error
        reason = error.strerror or error
        raise UserError(f"cannot write to {folder}: {reason}; correct this and repeat the command") from error


# ------------------------------------------------------------------------------------------------------------ manifest
def _empty_manifest(config: ConfigDict, settings: Settings, splits: Sequence[Split]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": config.data.name,
        "settings": {key: value for key, value in asdict(settings).items() if key not in ("skip_bad", "decoding")},
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
    """Return a sha256 over ids and labels in order."""
    digest = hashlib.sha256("\0".join(split.ids).encode(errors="surrogatepass"))
    digest.update(np.ascontiguousarray(split.labels, np.int8).tobytes())
    return digest.hexdigest()


def _resume(folder: Folder, wanted: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return `wanted` with the shards that are already in the folder; UserError if it has other content."""
    found = next((name for name in (UNFINISHED, MANIFEST) if (folder / name).exists()), None)
    if found is None:
        there = folder.path.iterdir() if folder.path.is_dir() else ()  # an object store has no empty folders
        if there := sorted(path.name for path in there if not path.name.startswith(".")):
            raise UserError(f"{folder} contains other files, such as {there[0]}; set --output to a new or empty folder")
        return wanted
    before, manifest = folder.read_json(found), folder / found
    with folder.reading(found):
        _require_same(folder, before, wanted)
        for name in wanted["splits"].keys() & before["splits"].keys():
            of_split = before["splits"][name]
            of_split["shards"] = [
                entry if entry and _is_there(manifest, entry) and (settings.skip_bad or not entry["left_out"]) else None
                for entry in of_split["shards"]
            ]
        return wanted | {"splits": wanted["splits"] | before["splits"]}


def _require_same(folder: Folder, before: dict[str, Any], wanted: dict[str, Any]) -> None:
    if before.get("format") != FORMAT:
        raise UserError(f"{folder} was packed by another version of mlmoe_jax; set another --output")
    if before["source"] != wanted["source"]:
        raise UserError(f"{folder} contains images of {before['source']}, not {wanted['source']}; set another --output")
    for key, value in wanted["settings"].items():
        if before["settings"][key] != value:
            raise UserError(
                f"{folder} was packed with pack.{key}={before['settings'][key]}, not {value}; use that value, or set "
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
            f"{folder} was packed when {wanted['source']} had other images or labels ({', '.join(changed)}); set "
            "another --output"
        )


def _is_there(manifest: epath.Path, entry: dict[str, Any]) -> bool:
    item = PackedFile.of(entry, manifest)
    path = manifest.parent / item.file
    return path.exists() and path.stat().length == item.bytes


def _finish(folder: Folder, manifest: dict[str, Any], splits: Sequence[Split]) -> None:
    """Write the labels of each split and then the manifest, which makes the folder a packed data set."""
    for split in splits:
        of_split = manifest["splits"][split.name]
        kept = np.ones(len(split), bool)
        kept[[item["row"] for entry in of_split["shards"] for item in entry["left_out"]]] = False
        if not kept.any():
            raise UserError(f"no image of split {split.name} can be read; the reasons are in {folder / UNFINISHED}")
        file = f"{_stem(split.name)}.npz"
        ids = [name.encode(errors="surrogatepass") for name, keep in zip(split.ids, kept, strict=True) if keep]
        folder.write_npz(file, labels=split.labels[kept].astype(np.int8), ids=np.array(ids))
        content = folder.read_bytes(file, MOST_DATA)
        of_split["images"] = int(kept.sum())
        of_split["labels"] = {"file": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    # An earlier command may have been interrupted in a split that this command does not name.
    complete = {name: of_split for name, of_split in manifest["splits"].items() if of_split["labels"]}
    folder.write_json(MANIFEST, manifest | {"splits": complete})
    if len(complete) == len(manifest["splits"]):
        (folder / UNFINISHED).unlink()


def _print_summary(folder: Folder, manifest: dict[str, Any], splits: Sequence[Split]) -> None:
    for split in splits:
        of_split = manifest["splits"][split.name]
        size = sum(entry["bytes"] for entry in of_split["shards"]) / 1e6
        print(f"{split.name}: {of_split['images']:,} images in {len(of_split['shards']):,} files, {size:,.1f} MB")
        if left_out := len(split) - of_split["images"]:
            print(f"  {left_out:,} unreadable images left out, listed in {MANIFEST}")
    print(f"to use it: --config.data.name=packed --config.data.root={folder}")


def _missing(manifest: dict[str, Any], split: Split, settings: Settings) -> Iterator[Shard]:
    entries = manifest["splits"][split.name]["shards"]
    for number, entry in enumerate(entries):
        if entry is None:
            first = number * settings.shard_images
            file = f"{_stem(split.name)}-{number:05d}-of-{len(entries):05d}.arrayrecord"
            yield Shard(split.name, number, file, range(first, min(first + settings.shard_images, len(split))))


def _stem(split: str) -> str:
    return quote(split, safe="")  # not all file systems accept names such as train[:50%]/a
