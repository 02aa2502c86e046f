"""Folders on local disk or in an object store, whose files are replaced atomically, and the targets of outputs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
from etils import epath
from filelock import FileLock, Timeout

from mlmoe_jax.errors import DiskError, UserError, reason_of
from mlmoe_jax.runtime.files import (
    PathLike,
    damage_explained,
    disk_error,
    disk_errors_explained,
    file_sha256,
    is_file_name,
    make_cache,
    open_regular,
    read_bytes,
)
from mlmoe_jax.runtime.formats import UNPACK_RATIO, dump_json, read_npz
from mlmoe_jax.runtime.table import Table
from mlmoe_jax.runtime.workers import require_program

Converted = TypeVar("Converted")

STANDARD_OUTPUT = "-"
LOCK = ".lock"  # the file in a folder that its writer locks
STORE_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "az": "adlfs",
    "abfs": "adlfs",
}  # required for an object store


class InUse(UserError):
    """An error: another process is writing to the folder."""


class _Changed(Exception):
    """The file that should be replaced has changed."""


class Folder:
    """A folder on local disk, or in an object store at an address such as gs://bucket/name, with atomic replacement."""

    kind = "folder"  # its name in messages

    def __init__(self, path: PathLike):
        self.path = epath.Path(os.fspath(path))
        self.is_local = "://" not in str(path)

    def __truediv__(self, name: str) -> epath.Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    # ------------------------------------------------------------------------------------------------ places inside
    def inside(self, name: str) -> epath.Path:
        """Return the path of the file `name` below the folder, such as samples/0000.jpg.

        Raises UserError if `name` or a symbolic link leads out of the folder.
        """
        if not all(map(is_file_name, name.split("/"))):
            raise UserError(f"{name!r} does not name a file in the {self.kind} {self}; give a path below it")
        path = self.path / name
        if self.is_local:
            real = os.path.realpath(path)
            if not Path(real).is_relative_to(os.path.realpath(self.path)):
                raise UserError(f"{path} is a link out of the {self.kind} {self}, to {real}; replace it by a copy")
        return path

    def writable_folder(self, name: str) -> epath.Path:
        """Return the path of a subfolder; UserError if it, or one of its entries, is a link out of this folder."""
        path = self.inside(name)
        for entry in path.iterdir() if self.is_local and path.is_dir() else ():
            self.inside(f"{name}/{entry.name}")
        return path

    # ------------------------------------------------------------------------------------------------ opening
    def require_creatable(self) -> None:
        """Raise UserError if the folder does not exist and cannot be created. Call it before a long computation."""
        require_program()
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
        """Create the folder if necessary, and hold its lock during the block.

        If another process holds the lock, wait for it with `wait`, otherwise raise InUse. Raises UserError if the
        folder cannot be created or locked.
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
        except (OSError, NotImplementedError) as error:
            raise self._lock_error(error) from error
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
        except (OSError, NotImplementedError) as error:
            raise self._lock_error(error) from error

    def _lock_error(self, error: OSError | NotImplementedError) -> UserError:
        path = self / LOCK
        if (reason := disk_error(error, path)) is not None:
            return reason
        advice = (
            f"remove {path}"
            if os.path.islink(path) or os.path.isdir(path)
            else "name a folder on a disk that has locks"
        )
        return UserError(f"cannot lock {self}: {reason_of(error)}; {advice}")

    def _require_library(self) -> None:
        store = str(self).partition("://")[0]
        library = STORE_PACKAGES.get(store)
        if not self.is_local and library and importlib.util.find_spec(library) is None:
            raise UserError(f"{self.kind}s at {store}:// need the package {library}: pip install {library}")

    # ------------------------------------------------------------------------------------------------ whole files
    def write_bytes(self, name: str, content: bytes) -> None:
        """Create or replace the file `name` atomically: a reader sees the old or the new content, also after a crash.

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

    def update(self, name: str, content: Callable[[], bytes]) -> None:
        """Create or replace a file that a person may edit at the same time, without a lock.

        `content` reads the file and returns its new content. It is called again if the file changes before it is
        replaced. A link inside the folder is followed. Raises UserError if it leads out of the folder.
        """
        path = self.inside(name)
        if self.is_local:
            path = named_file(path)
        while self.is_local:
            before, new = _version(path), content()
            with contextlib.suppress(_Changed), atomic_file(path) as partial:
                partial.write_bytes(new)
                with open(partial, "rb") as file:
                    os.fsync(file.fileno())  # here, so that the file is replaced just after it is compared
                if _version(path) != before:
                    raise _Changed
                return
        self.write_bytes(name, content())

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode(errors="backslashreplace"))  # characters that only paths can have

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, dump_json(value, indent=2) + "\n")

    def write_npz(self, name: str, **arrays: np.ndarray) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        self.write_bytes(name, buffer.getvalue())

    def write_csv(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Create or replace a CSV file atomically. The cells are written as in `Table.csv`."""
        self.write_text(name, Table(columns, rows).csv())

    def files(self) -> Iterator[str]:
        """Yield the names of all files below the folder, such as samples/0000.jpg; UserError if a link leads out."""
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
        """Return `damage_explained` for the file `name` of this folder."""
        return damage_explained(self / name)

    def read_bytes(self, name: str) -> bytes:
        """Return the content of the file `name`; UserError if `inside` refuses it, or if it is no readable file."""
        with self.reading(name):
            return read_bytes(self.inside(name))

    def read_text(self, name: str) -> str:
        with self.reading(name):
            return self.read_bytes(name).decode()

    def read_npz(
        self, name: str, convert: Callable[[dict[str, np.ndarray]], Converted] = dict, *, ratio: int = UNPACK_RATIO
    ) -> Converted:
        """Return `convert` of name -> array of an npz file; UserError if it is damaged or `convert` raises an error.

        `ratio` is explained in `formats.read_npz`.
        """
        with self.reading(name):
            return convert(read_npz(io.BytesIO(self.read_bytes(name)), ratio=ratio))

    def read_json(self, name: str, convert: Callable[[dict[str, Any]], Converted] = dict) -> Converted:
        """Return `convert` of the object in a JSON file; UserError without one, or if `convert` raises an error."""
        with self.reading(name):
            content = json.loads(self.read_bytes(name))
            if not isinstance(content, dict):
                raise ValueError("it should hold an object")
            return convert(content)


def _version(path: epath.Path) -> tuple[int, ...]:
    """Return numbers that differ after a local file was changed or replaced; () if it does not exist."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


# ---------------------------------------------------------------------------------------------------- temporary files
# PID and START, the time at which the process began, name a process of one PIDS: a boot of a machine, or a container.
_TEMPORARY = re.compile(r"\.mlmoe-(?P<pids>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+\.tmp")
_OLD = 24 * 3600  # seconds after which a temporary file is removed although its process is unknown
_cleaned: set[Path] = set()  # folders whose leftovers this process has removed


def new_temporary(folder: Path) -> Path:
    """Return a new path in a local folder for a temporary file or folder of this process.

    The name tells `remove_leftovers` to which process it belongs. The first call for a folder removes its leftovers.
    """
    if folder not in _cleaned:
        _cleaned.add(folder)
        remove_leftovers(folder)
    pid = os.getpid()
    return folder / f".mlmoe-{_pid_space()}-{pid}-{_start_of(pid) or 0}-{secrets.token_hex(4)}.tmp"


def remove_leftovers(folder: Path, *, below: bool = False) -> None:
    """Remove the temporary files and folders of ended processes from a local folder, which need not exist.

    Files of another machine or container, which may share the folder, are removed if they are a day old. With `below`,
    subfolders are searched too.
    """
    for parent, folders, files in os.walk(folder):
        for name in filter(_TEMPORARY.fullmatch, [*folders, *files]):
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # another process has removed it, or it belongs to another user
                if _is_leftover(path):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        folders[:] = [name for name in folders if below and not _TEMPORARY.fullmatch(name)]


def _is_leftover(path: Path) -> bool:
    owner, about = _TEMPORARY.fullmatch(path.name), path.lstat()
    if about.st_uid != os.getuid():  # /proc may hide the processes of other users
        return False
    if owner["pids"] == _pid_space():
        pid = int(owner["pid"])
        return pid != os.getpid() and _start_of(pid) != owner["start"]
    return time.time() - about.st_mtime > _OLD


@functools.cache
def _pid_space() -> str:
    """Return 8 hexadecimal digits that identify the boot of the machine and the container in which PIDs are unique."""
    try:
        space = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not on Linux
        space = secrets.token_hex()
    return hashlib.sha256(space.encode()).hexdigest()[:8]


def _start_of(pid: int) -> str:
    """Return the time at which a process began, in ticks since the boot; "" if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # other errors, such as too many open files, do not tell
        return ""
    return "" if state == "Z" else rest[18]


@contextlib.contextmanager
def atomic_file(path: epath.Path) -> Iterator[Path]:
    """Yield the path of a temporary local file. It is moved to `path` if the block succeeds, and removed otherwise.

    The temporary file is a hidden file in the folder of `path`, so that renaming is atomic. If `path` is in an object
    store, whose uploads are atomic, the file is in the folder for temporary files. A symbolic link at `path` is
    replaced, not followed. An existing file keeps its permissions. Several processes may write to `path` at once.
    """
    folder = Folder(path.parent)
    with disk_errors_explained(path), working_file(folder) as partial:
        mode = (Path(path) if folder.is_local and Path(path).is_file() else partial).stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors replaces the file by one that only its owner may read
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        if folder.is_local:
            os.replace(partial, path)
        else:
            epath.Path(partial).copy(path, overwrite=True)


@contextlib.contextmanager
def working_file(folder: Folder) -> Iterator[Path]:
    """Yield the path of a new file that is removed at the end.

    It is in `folder`, or if that is in an object store, in the folder for temporary files.
    """
    partial = new_temporary(Path(folder.path) if folder.is_local else Path(tempfile.gettempdir()))
    open(partial, "x").close()
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def named_file(path: PathLike) -> epath.Path:
    """Return the file to write for a path that the user has named: a link at this path is followed.

    Raises UserError if something other than a regular file is there, or the link must not be followed.
    """
    if "://" in os.fspath(path):
        return epath.Path(path)
    try:
        open_regular(path).close()  # the system refuses links of others in folders such as /tmp
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason_of(error)}") from error
    return epath.Path(os.path.realpath(path))


def require_new(path: PathLike) -> Path:
    """Return a local path for an output; UserError if it exists already, or if its parent folder does not exist."""
    local = Path(path)
    if os.path.lexists(local):
        raise UserError(f"{path} already exists; remove it or set another --output")
    if not local.parent.is_dir():
        raise UserError(f"there is no local folder {local.parent} to write {local.name} into")
    return local


def edit_note(path: epath.Path) -> epath.Path:
    """Return the path of the hidden file with the digest of an output, from which `keep_edited` sees an edit."""
    return path.with_name(f".{path.name}.sha256")


def keep_edited(path: epath.Path, sha256: str) -> None:
    """Rename the file at `path` if somebody has edited it since it was written.

    Call this function just before the file is replaced. It is for outputs whose path the user has not chosen. `sha256`,
    the hash of the new content, is stored in the file `edit_note`, beside the hash of the file that it replaces: the
    process may be killed before it replaces the file.
    """
    note = edit_note(path)
    known = note.read_text().split() if note.is_file() else []
    hashes = [file_sha256(path)] if path.is_file() else []
    if not set(hashes).issubset(known):
        names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        logging.getLogger(__name__).warning("%s was edited since it was written, and is now %s", path, kept)
        hashes = []
    Folder(path.parent).write_text(note.name, "\n".join([*hashes, sha256]))


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary local folder. It is renamed to `path` if the block succeeds, and removed otherwise.

    The temporary folder is a hidden folder beside `path`, so that renaming is atomic. `path` must not exist.
    """
    partial = new_temporary(path.parent)
    partial.mkdir()
    try:
        yield partial
        for file in filter(Path.is_file, partial.rglob("*")):
            file.chmod(partial.stat().st_mode & 0o666)  # libraries write files for their owner only
        os.sync()  # all at once, because 100,000 files one after the other take minutes
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cached_file(path: Path, write: Callable[[Path], None]) -> str:
    """Return the path of a file of the cache folder, which `write` makes, at another path, unless it is there.

    One thread or process of the machine makes it, and others that need it wait. Raises as `make_cache`.
    """
    if path.exists():
        return str(path)
    make_cache(path.parent)
    with disk_errors_explained(path), FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with atomic_file(epath.Path(path)) as partial:
                write(partial)
    return str(path)


@dataclass(frozen=True)
class OutputTarget:
    """The target of an output.

    Attributes:
      path: the file; None means standard output.
      kind: the format of the output, such as csv.
      is_named: whether the user has chosen the path. If not, an edited file there is kept, see `keep_edited`.
    """

    path: epath.Path | None
    kind: str
    is_named: bool = True

    def __str__(self) -> str:
        return "standard output" if self.path is None else str(self.path)


@contextlib.contextmanager
def open_output(target: OutputTarget) -> Iterator[TextIO]:
    """Open an output target for writing text in UTF-8. Bytes of paths that are not valid UTF-8 are written unchanged.

    A file appears under its name only if the block succeeds, see `atomic_file`. Standard output is flushed after each
    line. If the reader of standard output closes it, as in `… | head`, BrokenPipeError is raised. Raises UserError if
    the file cannot be written.
    """
    encoding: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    if target.path is None:
        sys.stdout.flush()
        if not hasattr(sys.stdout, "buffer"):  # a notebook shows text
            yield sys.stdout
            return
        file = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True, **encoding)
        try:
            yield file
        finally:
            file.detach()
        return
    try:
        with atomic_file(named_file(target.path) if target.is_named else target.path) as partial:
            with open(partial, "w", **encoding) as file:
                yield file
            if not target.is_named:
                keep_edited(target.path, file_sha256(partial))
    except OSError as error:  # a full disk is explained already
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
