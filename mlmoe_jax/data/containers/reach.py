"""The files at an address: a local path, a data set of the Hugging Face hub, or a store that fsspec knows.

photos, photos/1.parquet            on this machine
hf://datasets/USER/NAME             on the hub, in its cache; NAME@REVISION, and NAME/FOLDER or NAME/CONFIGURATION
gs://bucket/photos, s3://…          in an object store, read in place
photos/train-{000..127}.tar         the files of a range of numbers, in any of these
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from mlmoe_jax.data.image_search import is_skipped, list_files
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import HUB_DATA, damage_explained, is_file_name, open_regular
from mlmoe_jax.runtime.http import NoAnswer, require_online
from mlmoe_jax.runtime.hub import Address, Found, download, find_last, look_up, parse_data_address, unreachable
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import STORE_PACKAGES
from mlmoe_jax.runtime.text import quantity

CONNECTIONS = 8  # to the hub
_RANGE = re.compile(r"(?:(.*)/)?([^/]*)\{(\d+)\.\.(\d+)\}([^/]*)")


@dataclass(frozen=True)
class Place:
    """The files at an address.

    Attributes:
      folder: path or address of a folder.
      names: sorted paths of files below the folder, without hidden ones, and without those that other programs write
        beside data, such as _SUCCESS.
      inside: the file that the address names, or on the hub a file, a folder or a configuration; "" for all files.
      commit: for a data set of the hub, the commit that has the files.
    """

    folder: str
    names: tuple[str, ...]
    inside: str = ""
    commit: Address | None = None

    @property
    def hint(self) -> str:
        """A clause on the copy in Parquet files that the hub makes of a data set with a loading script; or ""."""
        if not (self.commit and any(name.endswith(".py") for name in self.names)):
            return ""
        return f", but a loading script, which is not run; try {self.folder}@refs/convert/parquet"

    def fetch(self, names: Sequence[str]) -> str:
        """Return the folder of the files `names`, to which files of the hub are downloaded."""
        return fetch(self.commit, names) if self.commit else self.folder

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises as `open_source`."""
        with open_source(f"{self.fetch([name])}/{name}") as file:
            return file.read()


def open_place(address: str) -> Place:
    """Return the files of a folder at any depth, or one file, at an address; no files if there is nothing.

    Raises UserError if the address cannot be reached, or if a file of a range does not exist.
    """
    if found := _RANGE.fullmatch(address):
        folder, start, *numbers, end = found.groups()
        return _choose_range(open_place(folder or "."), start, numbers, end)
    if address.startswith(HUB_DATA):
        hub, inside = parse_data_address(address)
        commit, names = find_commit(hub)
        return Place(f"{hub}", _data_files(names), inside, commit)
    address = os.path.expanduser(address)
    if "://" in address:
        names = _find_remote(address)
    elif os.path.isdir(address):
        names = list_files(address)
    else:
        names = [""] if os.path.isfile(address) else []
    if names == [""]:  # it is a file
        folder, name = os.path.split(address)
        return Place(folder or ".", (name,), name)
    return Place(address.rstrip("/"), _data_files(names))


def _choose_range(place: Place, start: str, numbers: Sequence[str], end: str) -> Place:
    """Return a place with the files of a range of numbers, whose names have `start` before it and `end` after it."""
    width, (first, last) = len(numbers[0]), map(int, numbers)
    start = f"{place.inside}/{start}" if place.inside else start
    known = set(place.names)
    chosen = []
    for number in range(first, last + 1):
        chosen.append(f"{start}{number:0{width}}{end}")
        if chosen[-1] not in known:
            raise UserError(f"there is no {chosen[-1]} in {place.folder}; correct the range of numbers")
    return replace(place, names=tuple(chosen))


def _data_files(names: Iterable[str]) -> tuple[str, ...]:
    kept = (name for name in names if not any(part.startswith("_") or is_skipped(part) for part in name.split("/")))
    return tuple(sorted(kept))


def open_source(address: str) -> BinaryIO:
    """Open a file with random access at a path or an address that is not of the hub.

    Raises OSError if it is local and cannot be read, otherwise UserError.
    """
    if "://" not in address:
        return open_regular(address)
    with _file_system(address) as (system, path):
        return system.open(path, "rb")


def read_range(address: str, start: int, size: int) -> bytes:
    """Return `size` bytes of a file from `start` on. Threads may call it; OSError if the file is shorter."""
    with _file_system(address) as (system, path):
        content = system.cat_file(path, start, start + size)
    if len(content) < size:
        raise OSError(errno.EIO, "its file has become shorter")
    return content


def version_of(address: str) -> str:
    """Return a text that changes if a file changes, but not with its links, owner and mode.

    Raises UserError if it cannot be read.
    """
    if "://" not in address:
        with damage_explained(address):
            local = os.stat(address)
        return f"{local.st_size} {local.st_mtime_ns}"
    with _file_system(address) as (system, path):
        return system.ukey(path)


def _find_remote(address: str) -> list[str]:
    """Return the paths of all files below an address; [""] if it is a file."""
    with _file_system(address) as (system, path):
        return [str(name).removeprefix(path.rstrip("/")).lstrip("/") for name in system.find(path)]


@contextlib.contextmanager
def _file_system(address: str) -> Iterator[tuple[Any, str]]:
    """Return a context with the file system of fsspec that has an address, and the path there.

    It converts the errors of a store, whose libraries raise their own types, to a UserError with the address.
    """
    from fsspec.core import url_to_fs  # here, because --help does without it

    try:
        yield url_to_fs(address)
    except UserError:
        raise
    except Exception as error:
        package = STORE_PACKAGES.get(address.partition("://")[0], "")
        if isinstance(error, ImportError) and package:
            raise UserError(f"{address} needs the package {package}; run `pip install {package}`") from error
        raise UserError(f"cannot read {address}: {reason_of(error)}") from error


# -------------------------------------------------------------------------------------------------------------- hub
def find_commit(address: Address) -> tuple[Address, Sequence[str]]:
    """Return the commit to which an address points, and the paths of its files.

    Raises UserError as `find_last`, or if the data set does not exist or is not visible.
    """

    def find(known: Found) -> Found:
        commit, files = look_up(address)
        names = [name for name in files if all(map(is_file_name, name.split("/")))]  # anybody may have written them
        return Found(commit.revision, names)

    commit, names = find_last(address, find, "give FOLDER")
    return replace(address, revision=commit), names


def fetch(commit: Address, names: Sequence[str]) -> str:
    """Return a folder with the files `names` of a commit, which are downloaded unless they are in the cache.

    Raises UserError if a download fails.
    """
    from huggingface_hub import constants

    repository = commit.repository.replace("/", "--")
    folder = f"{constants.HF_HUB_CACHE}/datasets--{repository}/snapshots/{commit.revision}"
    if missing := [name for name in names if not os.path.exists(f"{folder}/{name}")]:
        try:
            require_online()
            status(f"downloading {quantity(len(missing), 'file')} of {commit} to {folder}")
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(partial(download, commit), missing))  # raises the first error
        except NoAnswer as error:
            raise unreachable(commit, error, "give FOLDER") from error
    return folder
