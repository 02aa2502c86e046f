"""Which files belong to which split, by their names, their folders, or the data card of a data set of the hub.

The rules are those of the datasets library. A card, README.md, may list the files of each split in its header:

    configs:
    - config_name: default
      data_files:
      - split: train
        path: data/train-*

Without it, the splits are in the names: train-00000-of-00002.parquet, train/0.parquet, split=train/0.parquet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from mlmoe_jax.data.containers.reach import Place
from mlmoe_jax.data.names import STANDARD_SPLITS, split_key
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.text import abbreviate

CARD = "README.md"
COMPRESSED = re.compile(r".*\.(tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst|lz4))", re.IGNORECASE)  # tar files
_HEADER = re.compile(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)
_SHARD = re.compile(r"(.+)-\d{5,}-of-\d{5,}")
_PARTITION = re.compile(r"split=(.+)")


def find_suffix(place: Place) -> str:
    """Return the suffix of the files with images in a place, .parquet or .tar; "" if it has neither.

    A Parquet file with the name of a tar file has data about its images, as img2dataset writes it.
    """
    stems = [os.path.splitext(name) for name in place.names]
    tars = {stem for stem, suffix in stems if suffix.lower() == ".tar"}
    if any(suffix.lower() == ".parquet" and stem not in tars for stem, suffix in stems):
        return ".parquet"
    return ".tar" if tars or any(map(COMPRESSED.fullmatch, place.names)) else ""


def find_splits(place: Place, suffix: str) -> dict[str, str | None]:
    """Return the files with `suffix` (in lower case) of a place, and the split of each, None if it names no split.

    A file that the address names belongs to any split. Raises UserError if the card is damaged or lists several
    configurations, none of which is chosen.
    """
    names = [name for name in place.names if name.lower().endswith(suffix)]
    if place.inside in place.names:
        return dict.fromkeys({place.inside} & {*names})
    chosen = _choose(_configurations(place), place)
    folder = str(chosen.get("data_dir") or "") if chosen else place.inside
    start = f"{folder.strip('/')}/" if folder.strip("./") else ""
    if chosen and (patterns := list(_patterns(chosen.get("data_files")))):
        listed = {name: split for split, path in patterns for name in _match(names, start + path)}
        return {name: split or _split_of(name) for name, split in sorted(listed.items())}
    found = {name: _split_of(name.removeprefix(start)) for name in names if name.startswith(start)}
    if len(set(found.values())) == 1 and split_key(f"{next(iter(found.values()))}") not in STANDARD_SPLITS:
        return dict.fromkeys(found)  # as in part-00000-of-00002.parquet
    return found


def _configurations(place: Place) -> list[Mapping[str, Any]]:
    """Return the configurations that the card of a place lists; [] if it has none."""
    if CARD not in place.names:
        return []
    with damage_explained(f"{place.folder}/{CARD}"):
        header = _HEADER.match(place.read(CARD).decode("utf-8-sig"))
        stated = yaml.safe_load(header[1]) if header else {}
    listed = stated.get("configs") if isinstance(stated, dict) else None
    return [item for item in listed or () if isinstance(item, dict)]


def _choose(configurations: list[Mapping[str, Any]], place: Place) -> Mapping[str, Any] | None:
    """Return the configuration that the address names, or the default or only one; None if there are none."""
    named = {str(item.get("config_name") or "default"): item for item in configurations}
    defaults = [item for name, item in named.items() if item.get("default") or name == "default"]
    if place.inside in named:
        return named[place.inside]
    if place.inside or not named:
        return None
    if len(named) == 1 or defaults:
        return defaults[0] if defaults else configurations[0]
    raise UserError(
        f"{place.folder} has several configurations: {abbreviate(list(named))}; append one to the address, such as "
        f"{place.folder}/{next(iter(named))}"
    )


def _patterns(data_files: Any) -> Iterator[tuple[str | None, str]]:
    """Yield (split, pattern of paths) of the value of `data_files` in a card, which has one of several forms."""
    if isinstance(data_files, str):
        yield None, data_files
    elif isinstance(data_files, dict):
        pairs = [(data_files.get("split"), data_files["path"])] if "path" in data_files else data_files.items()
        for split, paths in pairs:
            yield from ((split, str(path)) for path in (paths if isinstance(paths, list) else [paths]))
    elif isinstance(data_files, list):
        for item in data_files:
            yield from _patterns(item)


def _match(names: Iterable[str], pattern: str) -> list[str]:
    from fsspec.utils import glob_translate  # here, because --help does without it

    fits = re.compile(glob_translate(pattern.removeprefix("./"))).match
    return [name for name in names if fits(name)]


def _split_of(name: str) -> str | None:
    """Return the split that the path of a file names; None if it names none."""
    *folders, file = name.split("/")
    shard = _SHARD.fullmatch(file.partition(".")[0])
    stem = shard[1] if shard else file.partition(".")[0]
    words = list(filter(None, re.split(r"[-_. \d]+", stem)))
    named = {word for word in (stem, *words[:1], *words[-1:]) if split_key(word) in STANDARD_SPLITS}
    if len(set(map(split_key, named))) == 1:
        return named.pop()
    for folder in reversed(folders):
        if partition := _PARTITION.fullmatch(folder):
            return partition[1]
        if split_key(folder) in STANDARD_SPLITS:
            return folder
    return stem if shard else None
