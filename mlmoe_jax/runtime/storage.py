"""Folders on local disk or in an object store, whose files are replaced atomically, and the targets of outputs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
from etils import epath
from filelock import FileLock, Timeout

from mlmoe_jax.errors import DiskError, UserError
from mlmoe_jax.runtime.files import (
    damage_explained,
    disk_errors_explained,
    is_file_name,
    read_bytes,
)
from mlmoe_jax.runtime.formats import dump_json, read_npz
from mlmoe_jax.runtime.table import Table

Converted = TypeVar("Converted")

STANDARD_OUTPUT = "-"
LOCK = ".lock"  # the file in a folder that its writer locks
_LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}  # required by etils for an object store


class InUse(UserError):
    """Another process is writing to the folder."""


class Folder:
    """A folder at a local path or an address such as gs://bucket/name, whose files are replaced atomically."""

    kind = "folder"  # its name in messages

    def __init__(self, path: str | os.PathLike):
        self.path = epath.Path(os.fspath(path))
        self.is_local = "://" not in str(path)

    def __truediv__(self, name: str) -> epath.Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    # ------------------------------------------------------------------------------------------------ places inside
    def inside(self, name: str) -> epath.Path:
        """Return the path `name`, such as samples/0000.jpg; UserError if it or a link leads out of the folder."""
        if not all(map(is_file_name, name.split("/"))):
            raise UserError(f"{name!r} does not name a file in the {self.kind} {self}; give a path below it")
        path = self.path / name
        if self.is_local:
            real = os.path.realpath(path)
            if not Path(real).is_relative_to(os.path.realpath(self.path)):
                raise UserError(f"{path} is a link out of the {self.kind} {self}, to {real}; replace it by a copy")
        return path

    def writable_folder(self, name: str) -> epath.Path:
        """Return the path of a folder inside; UserError if the folder or an entry of it leads out of this one."""
        path = self.inside(name)
        for entry in path.iterdir() if self.is_local and path.is_dir() else ():
            self.inside(f"{name}/{entry.name}")
        return path

    # ------------------------------------------------------------------------------------------------ opening
    def require_creatable(self) -> None:
        """Raise UserError if the folder could not be created; called before long computations."""
        self._require_library()
        if self.is_local:
            path = Path(self.path).absolute()
            # Not Path.exists, because os.path.exists takes any name.
            existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
            if not existing.is_dir():
                raise UserError(f"cannot make the {self.kind} {self}: {existing} is a file")
            if not os.access(existing, os.W_OK):
                raise DiskError(f"cannot make the {self.kind} {self}: {existing} is not writable")

    @contextlib.contextmanager
    def writing(self, *, wait: bool = False) -> Iterator[None]:
        """Create the folder and hold its lock.

        Args:
          wait: wait while another process holds the lock.

        Raises:
          UserError: the folder cannot be created.
          InUse: another process holds the lock, without `wait`.
        """
        try:
            with disk_errors_explained(self):
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the {self.kind} {str(self)[:200]}: {error.strerror or error}") from error
        if not self.is_local:  # object stores have no locks
            yield
            return
        lock = FileLock(self.path / LOCK, timeout=-1 if wait else 0)
        try:
            lock.acquire()
        except Timeout as error:
            raise InUse(f"another process is writing to {self}; wait for it or name another folder") from error
        except OSError as error:  # it is a link or a folder, or belongs to somebody else
            raise UserError(f"cannot lock {self}: {error.strerror or error}; remove {self / LOCK}") from error
        try:
            yield
        finally:
            lock.release()

    def is_in_use(self) -> bool:
        """Return whether another process holds the lock of the folder; False in an object store, which has no locks."""
        path = self.path / LOCK
        if not (self.is_local and path.exists()):
            return False
        try:
            with FileLock(path, timeout=0):
                return False
        except Timeout:
            return True

    def _require_library(self) -> None:
        store = str(self).partition("://")[0]
        library = _LIBRARIES.get(store)
        if not self.is_local and library and importlib.util.find_spec(library) is None:
            raise UserError(f"{self.kind}s at {store}:// need the package {library}: pip install {library}")

    # ------------------------------------------------------------------------------------------------ whole files
    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace a file atomically: after a crash, and for readers, it has the old content or the new.

        A symbolic link of this name is replaced, not followed. Raises UserError if `name` leads out of this folder.
        """
        parent_name, slash, file_name = name.rpartition("/")
        parent = self.inside(parent_name) if slash else self.path
        path = parent / file_name
        if not self.is_local:  # objects need no folder
            path.write_bytes(content)
            return
        parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            partial.write_bytes(content)

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode(errors="backslashreplace"))  # characters that only paths can have

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, dump_json(value, indent=2) + "\n")

    def write_npz(self, name: str, **arrays: np.ndarray) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        self.write_bytes(name, buffer.getvalue())

    def write_csv(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Replace a CSV file atomically; see `Table.csv` for its cells."""
        self.write_text(name, Table(columns, rows).csv())

    def files(self) -> Iterator[str]:
        """Yield the names of all files below the folder, such as samples/0000.jpg; UserError at a link out of it."""
        waiting = [""]
        while waiting:
            prefix = waiting.pop()
            for entry in (self.path / prefix).iterdir():
                name = f"{prefix}{entry.name}"
                if self.inside(name).is_dir():
                    waiting.append(f"{name}/")
                else:
                    yield name

    def reading(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return `damage_explained` for a file of this folder."""
        return damage_explained(self / name)

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file; UserError if it cannot be read or is not a regular file."""
        with self.reading(name):
            return read_bytes(self / name)

    def read_text(self, name: str) -> str:
        with self.reading(name):
            return self.read_bytes(name).decode()

    def read_npz(self, name: str, convert: Callable[[dict[str, np.ndarray]], Converted] = dict) -> Converted:
        """Return the arrays of an npz file, converted; UserError if it is damaged or `convert` raises an error."""
        with self.reading(name):
            return convert(read_npz(io.BytesIO(self.read_bytes(name))))

    def read_json(self, name: str, convert: Callable[[dict[str, Any]], Converted] = dict) -> Converted:
        """Return the object in a JSON file, converted; UserError if it is damaged or `convert` raises an error."""
        with self.reading(name):
            content = json.loads(self.read_bytes(name))
            if not isinstance(content, dict):
                raise ValueError("it should hold an object")
            return convert(content)


@contextlib.contextmanager
def atomic_file(path: epath.Path, *, alone: bool = True) -> Iterator[Path]:
    """Yield the path of a local file to write. It becomes `path` if the block succeeds and is removed otherwise.

    The file is hidden and in the folder of `path`, so that renaming is atomic. For an object store, whose uploads
    are atomic, it is in a temporary folder. It is created anew, so no link under its name or `path` is followed.

    Args:
      path: the path at the end.
      alone: no other process writes `path` at the same time. Otherwise the name of the file is a random number, because
        process numbers repeat in containers that share a folder.
    """
    local = "://" not in str(path)
    with disk_errors_explained(path), contextlib.ExitStack() as stack:
        if local:
            partial = Path(path).with_name(f".{path.name}.{'' if alone else f'{secrets.randbits(64)}.'}tmp")
            partial.unlink(missing_ok=True)  # left by a process that was killed
        else:
            partial = Path(stack.enter_context(tempfile.TemporaryDirectory())) / path.name
        open(partial, "x").close()
        mode = partial.stat().st_mode
        try:
            yield partial
            partial.chmod(mode)  # safetensors replaces the file by one that only its owner may read
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            if local:
                os.replace(partial, path)
            else:
                epath.Path(partial).copy(path, overwrite=True)
        finally:
            partial.unlink(missing_ok=True)


def require_new(path: str | os.PathLike) -> Path:
    """Return the local path of an output that must not exist yet; UserError if it does, or if its folder does not."""
    local = Path(path)
    if os.path.lexists(local):
        raise UserError(f"{path} already exists; remove it or set another --output")
    if not local.parent.is_dir():
        raise UserError(f"there is no local folder {local.parent} to write {local.name} into")
    return local


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new local folder to fill. It becomes `path`, which must not exist, if the block succeeds.

    Until then it is a hidden folder beside `path`, so that renaming is atomic. It is removed if the block fails.
    """
    partial = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        yield partial
        for file in filter(Path.is_file, partial.rglob("*")):
            file.chmod(partial.stat().st_mode & 0o666)  # libraries write files for their owner only
        os.sync()  # all at once, because 100,000 files one after the other take minutes
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True)
class OutputTarget:
    """The target of an output: a file, or standard output if `path` is None. `kind` is its format, such as csv."""

    path: epath.Path | None
    kind: str

    def __str__(self) -> str:
        return "standard output" if self.path is None else str(self.path)


@contextlib.contextmanager
def open_output(target: OutputTarget) -> Iterator[TextIO]:
    """Open a target to write text to it. Paths in the text that are not UTF-8 keep their bytes.

    A file gets its name only if the block succeeds, see `atomic_file`. Standard output is written line by line. If its
    reader closes it, as in `… | head`, BrokenPipeError ends the command. Raises UserError if writing fails.
    """
    encoding: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    if target.path is None:
        sys.stdout.flush()
        file = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True, **encoding)
        try:
            yield file
        finally:
            file.detach()
        return
    try:
        with atomic_file(target.path, alone=False) as partial, open(partial, "w", **encoding) as file:
            yield file
    except OSError as error:  # a full disk is explained already
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
