"""Lists of paths, one per line, of any length: the paths stay in the file."""

import codecs
import os
import sys
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from etils import epath

from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import KIB, MIB, MOST_LIST, disk_errors_explained, explain_bytes, open_regular
from mlmoe_jax.runtime.storage import new_temporary

STANDARD_INPUT = "-"
BLOCK = 64 * KIB  # of a list, read at once
LONGEST_LINE = MIB
_KEPT_BLOCKS = 16


class PathList(Sequence[str]):
    """The paths in a file. Memory holds where each block of lines starts, and the last blocks that were read.

    Empty lines are left out. A path is relative to `folder`, unless it is absolute or an address. Invalid UTF-8 is kept
    as by `os.fsdecode`. Raises UserError if the list cannot be read, or if it changes later.

    Args:
      item: the name of the list in messages.
    """

    def __init__(self, file: str, folder: str, item: str):
        self.file, self.item = file, item
        self._prefix = os.path.join(folder, "")
        self._starts, self._rows = array("Q"), array("Q")  # of each block: its first byte, and its first path
        self._blocks: dict[int, list[str]] = {}
        start = self._count = 0
        try:
            with open_regular(file) as stream:
                self._version = _version(stream)
                for block in _read_blocks(stream):
                    if b"\0" in block:
                        raise UserError(f"the list {item} {explain_bytes(block)}")
                    self._starts.append(start)
                    self._rows.append(self._count)
                    self._count += len(_lines(block, start))
                    start += len(block)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the list {item}: {reason_of(error)}") from error
        self._starts.append(start)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> str:
        row = range(self._count)[row]
        number = bisect_right(self._rows, row) - 1
        block = self._blocks.get(number) or self._read(number)
        return block[row - self._rows[number]]

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self._rows)):
            yield from self._read(number)

    def _read(self, number: int) -> list[str]:
        start, end = self._starts[number : number + 2]
        with open_regular(self.file) as stream:
            if _version(stream) != self._version:
                raise UserError(f"the list {self.item} has changed while it was read; repeat the command")
            stream.seek(start)
            block = stream.read(end - start)
        if len(self._blocks) >= _KEPT_BLOCKS:
            self._blocks = {}
        paths = [self._path(line.decode(errors="surrogateescape")) for line in _lines(block, start)]
        self._blocks[number] = paths
        return paths

    def _path(self, line: str) -> str:
        return line if line.startswith("/") or "://" in line else self._prefix + line


def _read_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file in blocks of whole lines; ValueError if a line has more than LONGEST_LINE bytes."""
    rest = b""
    while piece := stream.read(BLOCK):
        rest += piece
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if end:
            yield rest[:end]
        rest = rest[end:]
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"a line has more than {LONGEST_LINE:,} bytes")
    if rest:
        yield rest


def _lines(block: bytes, start: int) -> list[bytes]:
    """Return the lines of a block that are not empty, without the byte order mark of the first block."""
    block = block if start else block.removeprefix(codecs.BOM_UTF8)
    return [line for line in block.splitlines() if line.strip()]


def _version(stream: BinaryIO) -> tuple[int, int]:
    found = os.fstat(stream.fileno())
    return found.st_size, found.st_mtime_ns


def read_path_list(item: str) -> PathList:
    """Return the paths in a list `@FILE`, or on standard input for `-`; UserError if it cannot be read.

    A list that is not a local file is first copied to the folder for temporary files. The copy is removed with the
    result.
    """
    address = item.removeprefix("@")
    if item != STANDARD_INPUT and "://" not in address:
        return PathList(address, os.path.dirname(address), item)
    copy = new_temporary(Path(tempfile.gettempdir()))
    try:
        with disk_errors_explained(copy), open(copy, "xb") as file:
            if item == STANDARD_INPUT:
                _copy(sys.stdin.buffer, file)
            else:
                with epath.Path(address).open("rb") as source:
                    _copy(source, file)
        paths = PathList(os.fspath(copy), os.path.dirname(address), item)
    except BaseException as error:
        copy.unlink(missing_ok=True)
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        # each store's library raises its own types
        raise UserError(f"cannot read the list {item}: {reason_of(error)}") from error
    weakref.finalize(paths, copy.unlink, missing_ok=True)
    return paths


def _copy(source: BinaryIO, file: BinaryIO) -> None:
    while piece := source.read(MIB):
        file.write(piece)
        if file.tell() > MOST_LIST:
            raise ValueError(f"it has more than {MOST_LIST:,} bytes")
