"""The target of an output: a file, which gets its name only when it is complete, or standard output."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import disk
from mlmoe_jax.runtime.storage import whole_file

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
    except OSError as error:  # other than those of `disk`
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _standard_output() -> Iterator[TextIO]:
    sys.stdout.flush()
    file = io.TextIOWrapper(
        sys.stdout.buffer, encoding="utf-8", errors="surrogateescape", newline="", line_buffering=True
    )
    try:
        yield file
    except BrokenPipeError:  # `… | head`
        disk.discard_output()
    finally:
        file.detach()
