"""Files that somebody else may have written: only regular files are read, and never more bytes than expected.

A device or a pipe under the name of a file has no end, or waits for ever. All errors are an OSError, whose `strerror`
is the reason, so that callers need to know of no further kinds of failure.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO, TextIO

from etils import epath

KIB, MIB, GIB = 2**10, 2**20, 2**30

MOST_TEXT = 512 * MIB  # of a text or JSON file in a run folder
MOST_LIST = 256 * MIB  # of a list of paths, about four million
MOST_DATA = 8 * GIB  # of weights, or of the labels of a data set in one file; the largest published ones have 6 GB
MOST_LINE = 16 * MIB  # letters of one line of a table


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a local file to read it; OSError if it is a pipe, a socket, a device or a folder, or no such name can be."""
    try:
        # O_NONBLOCK: opening a pipe does not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a NUL character, or one that the encoding of the file system does not have
        raise OSError(errno.EINVAL, "no file can have this name") from error
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise OSError(errno.EINVAL, os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike, most: int) -> bytes:
    """Return a file of at most `most` bytes, local or at an address such as gs://; OSError if it cannot be read."""
    if "://" in os.fspath(path):
        return _read_remote(path, most)
    with open_regular(path) as file:
        _refuse_more(os.fstat(file.fileno()).st_size, most)  # unread
        return read_stream(file, most)


def read_stream(file: BinaryIO, most: int) -> bytes:
    """Return the rest of an open file or pipe; OSError if it has more than `most` bytes."""
    content = bytearray()
    while piece := file.read(MIB):
        content += piece
        _refuse_more(len(content), most)
    return bytes(content)


def lines_of(file: TextIO) -> Iterator[str]:
    """Yield the lines of a text file; ValueError at one with more than MOST_LINE letters."""
    while line := file.readline(MOST_LINE):
        if len(line) == MOST_LINE and not line.endswith("\n"):
            raise ValueError(f"a line has more than {MOST_LINE:,} letters")
        yield line


def _read_remote(path: str | os.PathLike, most: int) -> bytes:
    try:
        place = epath.Path(path)
        _refuse_more(place.stat().length, most)
        return place.read_bytes()
    except OSError:
        raise
    except Exception as error:  # each store's library has errors of its own, and etils those of a package that lacks
        reason = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0].rstrip(".")
        raise OSError(errno.EIO, reason) from error


def _refuse_more(size: int, most: int) -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
