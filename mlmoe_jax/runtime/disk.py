"""Disks on which nothing can be written: full, read-only, or failing."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from mlmoe_jax.errors import NoRoom, UserError

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room and repeat the same command"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable or name another folder"),
    errno.EIO: "check the disk and repeat the same command",
}


def no_room(error: BaseException, place: object = "") -> NoRoom | None:
    """Return the sentence about a disk that is full, read-only or failing if that caused an error, otherwise None.

    place: the file or folder that was written; by default the one that the error names.
    """
    if isinstance(error, UserError):  # whoever raised it knew the reason
        return error if isinstance(error, NoRoom) else None
    cause: BaseException | None = error
    while cause is not None:
        if number := _number(cause):
            what = f"cannot write {place}" if place else "cannot read or write"
            if not place and (name := getattr(cause, "filename", None)):
                what += f" {os.fsdecode(name)}"
            return NoRoom(f"{what}: {os.strerror(number)}; {_REMEDIES[number]}")
        cause = cause.__cause__
    return None


def _number(error: BaseException) -> int | None:
    """Return the errno of an error if it is one of these; libraries in C++ raise other types with the same text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _REMEDIES else None
    text = str(error)
    return next((number for number in _REMEDIES if os.strerror(number) in text), None)


def flush_output() -> None:
    """Write what is printed so far; NoRoom if that fails, which at exit would have no sentence."""
    try:
        with writing("standard output"):
            sys.stdout.flush()
    except (OSError, NoRoom):
        discard_output()
        raise


def discard_output() -> None:
    """Discard what standard output's buffers hold and will hold, so that writing them at exit cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def writing(place: object) -> Iterator[None]:
    """Turn any error of a full, read-only or failing disk in the block, which writes `place`, into NoRoom."""
    try:
        yield
    except Exception as error:
        if (reason := no_room(error, place)) is None:
            raise
        raise reason from error
