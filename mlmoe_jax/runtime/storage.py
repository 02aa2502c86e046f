"""Folders and files on local disk or in an object store; files are replaced whole."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from etils import epath

from mlmoe_jax.errors import UserError

_LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}  # required by etils for an object store


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return strict JSON: a number that is not finite, such as the mAP of a split without positives, becomes null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [plain(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, allow_nan=False)


class Folder:
    """A folder at a local path or an address such as gs://bucket/name, whose files are replaced whole."""

    kind = "folder"  # its name in messages

    def __init__(self, path: str | os.PathLike):
        self.path = epath.Path(os.fspath(path))
        self.is_local = "://" not in str(path)

    def __truediv__(self, name: str) -> epath.Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    # ------------------------------------------------------------------------------------------------ opening
    def require_place(self) -> None:
        """Raise UserError if the folder could not be created; called before long computations."""
        self._require_library()
        if self.is_local:
            path = Path(self.path)
            there = next(place for place in (path, *path.absolute().parents) if place.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                reason = "is not writable" if there.is_dir() else "is a file"
                raise UserError(f"cannot make the {self.kind} {self}: {there} {reason}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Create the folder and hold its lock; UserError if another process holds it or it cannot be created."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the {self.kind} {self}: {error.strerror or error}") from error
        if not self.is_local:  # object stores have no locks
            yield
            return
        with open(self.path / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"another process is writing to {self}; wait for it or name another folder") from error
            yield

    def _require_library(self) -> None:
        store = str(self).partition("://")[0]
        library = _LIBRARIES.get(store)
        if not self.is_local and library and importlib.util.find_spec(library) is None:
            raise UserError(f"{self.kind}s at {store}:// need the package {library}: pip install {library}")

    # ------------------------------------------------------------------------------------------------ whole files
    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace a file whole: a reader, or a crash, sees the old content or the new."""
        path = self / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_local:
            path.write_bytes(content)
            return
        with whole_file(path) as partial:
            partial.write_bytes(content)

    def write_text(self, name: str, text: str) -> None:
        """Replace a text file whole."""
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file whole."""
        self.write_text(name, to_json(value, indent=2) + "\n")

    def write_npz(self, name: str, **arrays: np.ndarray) -> None:
        """Replace a compressed npz file whole."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        self.write_bytes(name, buffer.getvalue())

    def write_csv(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Replace a CSV file whole."""
        buffer = io.StringIO()
        table = csv.writer(buffer, lineterminator="\n")
        table.writerows([columns, *rows])
        self.write_text(name, buffer.getvalue())

    def files(self) -> Iterator[epath.Path]:
        """Yield all files below the folder."""
        waiting = [self.path]
        while waiting:
            for path in waiting.pop().iterdir():
                if path.is_dir():
                    waiting.append(path)
                else:
                    yield path

    def read_text(self, name: str) -> str:
        """Return a text file."""
        return (self / name).read_text()

    def read_json(self, name: str) -> Any:
        """Return a JSON file; UserError if it is damaged."""
        try:
            return json.loads(self.read_text(name))
        except ValueError as error:
            raise UserError(f"{self / name} is damaged: {error}") from error


@contextlib.contextmanager
def whole_file(path: epath.Path, *, alone: bool = True) -> Iterator[Path]:
    """Yield the path of a local file to write; it becomes `path` if the block succeeds and is removed otherwise.

    It is a hidden file in the same folder, so that renaming is atomic; for an object store, whose uploads are atomic,
    it is in a temporary folder. alone: no other process writes the same file at the same time.
    """
    local = "://" not in str(path)
    with contextlib.ExitStack() as stack:
        if local:
            partial = Path(path).with_name(f".{path.name}.{'' if alone else f'{os.getpid()}.'}tmp")
        else:
            partial = Path(stack.enter_context(tempfile.TemporaryDirectory())) / path.name
        try:
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            if local:
                os.replace(partial, path)
            else:
                epath.Path(partial).copy(path, overwrite=True)
        finally:
            partial.unlink(missing_ok=True)


STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class Target:
    """The target of an output: a file, or standard output if `path` is None; `kind` is its format, such as csv."""

    path: epath.Path | None
    kind: str

    def __str__(self) -> str:
        return "standard output" if self.path is None else str(self.path)


# ----------------------------------------------------------------------------------------------------- files, streams
@contextlib.contextmanager
def opened(target: Target) -> Iterator[TextIO]:
    """Open a target for writing.

    A file gets its name only if the block succeeds, see `whole_file`. Standard output is written line by line; if its
    reader closes it, the block ends without an error. Paths that are not UTF-8 keep their bytes. Raises UserError if
    writing fails.
    """
    with _standard_output() if target.path is None else _text_file(target.path) as file:
        yield file


@contextlib.contextmanager
def _text_file(path: epath.Path) -> Iterator[TextIO]:
    try:
        with (
            whole_file(path, alone=False) as partial,
            open(partial, "w", encoding="utf-8", errors="surrogateescape", newline="") as file,
        ):
            yield file
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _standard_output() -> Iterator[TextIO]:
    sys.stdout.flush()
    file = io.TextIOWrapper(
        sys.stdout.buffer, encoding="utf-8", errors="surrogateescape", newline="", line_buffering=True
    )
    try:
        yield file
    except BrokenPipeError:  # `… | head`; discard the content of the buffers, also when the program ends
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    finally:
        file.detach()
