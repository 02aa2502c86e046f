"""Which files belong to which split, by their names, their folders, or the data card of a data set of the hub.

The datasets library has the same rules. A card, README.md, may list the files of each split in its header:

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

_CARD = "README.md"
COMPRESSED = re.compile(r".*\.(tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst|lz4))", re.IGNORECASE)  # tar files
_HEADER = re.compile(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)
_SHARD = re.compile(r"-\d{5,}-of-\d{5,}.*")
PARTITION = "split="  # before the name of the split, as Hive names folders


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
        return {name: None for name in names if name == place.inside}
    with damage_explained(f"{place.folder}/{_CARD}"):
        chosen = _choose_configuration(place)
        folder = os.path.normpath(f"./{chosen.get('data_dir') or ''}")
        start = f"{folder}/".removeprefix("./")
        patterns = list(_patterns(chosen.get("data_files") or []))
    if patterns:
        listed = {name: split for split, path in patterns for name in _match(names, start + path)}
        return {name: split or _split_of(name) for name, split in sorted(listed.items())}
    return {name: _split_of(name.removeprefix(start)) for name in names if name.startswith(start)}


def _choose_configuration(place: Place) -> Mapping[str, Any]:
    """Return the configuration of the card that the address names, or the default or only one.

    Without a card, it is one of all files in the folder that the address names.
    """
    named = {f"{item.get('config_name') or 'default'}": item for item in _read_configurations(place)}
    if place.inside or not named:
        return named.get(place.inside, {"data_dir": place.inside})
    defaults = [item for name, item in named.items() if item.get("default") or name == "default"]
    if len(named) > 1 and not defaults:
        raise UserError(
            f"{place.folder} has several configurations: {abbreviate(list(named))}; append one to the address, such as "
            f"{place.folder}/{next(iter(named))}"
        )
    return [*defaults, *named.values()][0]


def _read_configurations(place: Place) -> list[Mapping[str, Any]]:
    if _CARD not in place.names:
        return []
    header = _HEADER.match(place.read(_CARD).decode("utf-8-sig"))
    stated = yaml.safe_load(header[1]) if header else None
    return stated.get("configs") or [] if isinstance(stated, dict) else []


def _patterns(data_files: Any) -> Iterator[tuple[str | None, str]]:
    """Yield (split, pattern of paths) of the value of `data_files` in a card: a path, or a list of paths or splits."""
    for item in data_files if isinstance(data_files, list) else [data_files]:
        split, paths = (item["split"], item["path"]) if isinstance(item, dict) else (None, item)
        yield from ((split, path.removeprefix("./")) for path in (paths if isinstance(paths, list) else [paths]))


def _match(names: Iterable[str], pattern: str) -> list[str]:
    from fsspec.utils import glob_translate  # here, because --help does without it

    return list(filter(re.compile(glob_translate(pattern)).match, names))


def _split_of(name: str) -> str | None:
    """Return the split that the path of a file names; None if it names none."""
    *folders, file = name.split("/")
    stem = _SHARD.sub("", file.partition(".")[0])
    words = re.findall(r"[^-_ \d]+", stem)
    named = {word for word in (stem, *words[:1], *words[-1:]) if split_key(word) in STANDARD_SPLITS}
    if len({*map(split_key, named)}) == 1:
        return named.pop()
    for folder in reversed(folders):
        if folder.startswith(PARTITION) or split_key(folder) in STANDARD_SPLITS:
            return folder.removeprefix(PARTITION)
    return None
