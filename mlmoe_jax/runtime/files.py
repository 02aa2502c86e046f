"""Files on local disk or in an object store: where they may be, how they are opened, and what their errors mean.

Only regular files are read, and never more bytes than a limit: reading a device or a pipe may never end. Every error of
reading is an OSError, whose `strerror` is the reason.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from mlmoe_jax.errors import DiskError, UserError, reason_of
from mlmoe_jax.runtime.text import unicode_forms

PathLike = str | os.PathLike
KIB, MIB, GIB = 2**10, 2**20, 2**30

MOST_TEXT = 512 * MIB  # size of the manifest of a packed data set
MOST_LIST = 16 * GIB  # size of a list of paths on a pipe or in an object store, which is copied to a disk
MOST_DATA = 8 * GIB  # size of a file of weights or labels; the largest published weights have 6 GB

# Prefixes of names that are not paths: models on the Hugging Face hub, and models and data of installed packages.
HUB, DEMO = "hf:", "demo:"
HUB_DATA = "hf://datasets/"  # of data sets on the hub

_ARCHIVES = (b"PK\3\4", b"\xd0\xcf\x11\xe0")  # first bytes of .xlsx, .ods and other ZIP files, and of .xls
_CONTROLS = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]|^%PDF")
_LONGEST_NAME = 255  # bytes, on common file systems
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space and repeat the same command"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable or name another folder"),
    errno.EIO: "check the disk and repeat the same command",
}


def cache_folder() -> Path:
    """Return the cache folder, which may not exist: $MLMOE_CACHE, or else mlmoe_jax in the user's cache folder."""
    if folder := os.environ.get("MLMOE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlmoe_jax"


def make_cache(folder: PathLike) -> None:
    """Make a folder of the cache; DiskError if it cannot be made."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = f"cannot make {folder} for the cache: {reason_of(error)}; let MLMOE_CACHE name another folder"
        raise disk_error(error, folder) or DiskError(reason) from error


def is_file_name(value: Any) -> bool:
    """Return whether a value is a string that can name a file in a folder: not empty, without / and not too long."""
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
        return False
    try:
        return len(os.fsencode(value)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def find_file(path: PathLike) -> str:
    """Return the path of a local file whose name may be composed or decomposed (Unicode's forms NFC and NFD).

    A Mac writes é in the names of files as e and an accent, also into archives. Most tables have é as one character.
    The result is `path` if this file exists, or if neither form of its name exists.
    """
    path = os.fspath(path)
    if path.isascii() or "://" in path or os.path.lexists(path):
        return path
    return next(_spellings(path), path)


def _spellings(path: str) -> Iterator[str]:
    """Yield the existing paths that differ from `path` at most in parts that are composed (NFC) or decomposed (NFD)."""
    parent, name = os.path.split(path)
    for folder in [parent] if parent.isascii() else _spellings(parent):
        yield from filter(os.path.lexists, (os.path.join(folder, form) for form in unicode_forms(name)))


def is_read_only(location: PathLike) -> bool:
    """Return whether a location is a model on the Hugging Face hub or in this package."""
    return os.fspath(location).startswith((HUB, DEMO))


def open_regular(path: PathLike) -> BinaryIO:
    """Open a local file in binary mode; OSError if it is no regular file, or if its name is impossible."""
    try:
        # O_NONBLOCK: opening a pipe does not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a NUL character, or a character that the file system cannot encode
        raise OSError(errno.EINVAL, "no file can have this name") from error
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise OSError(errno.EINVAL, os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else "it is not a regular file")
    return os.fdopen(descriptor, "rb")


class NotText(UnicodeDecodeError):
    """An error: a file is not text in UTF-8."""


def _refuse(error: UnicodeError) -> NoReturn:
    raise NotText(*error.args)


_STRICT = "mlmoe"  # the way in which Python's decoders treat invalid bytes
codecs.register_error(_STRICT, _refuse)


def open_text(path: PathLike) -> TextIO:
    """Open a regular local file as UTF-8 text. A byte order mark is skipped, and line ends are not converted.

    Raises OSError as `open_regular`, and NotText for a binary file or another encoding, perhaps when a line is read.
    """
    file = open_regular(path)
    try:
        _require_text(file.peek(64))
    except NotText:
        file.close()
        raise
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors=_STRICT, newline="")


def read_text(path: PathLike, most: int = MOST_DATA) -> str:
    """Return the result of `read_bytes` as text without a byte order mark; NotText if it is not UTF-8."""
    content = read_bytes(path, most)
    _require_text(content)
    return content.decode("utf-8-sig", _STRICT)


def _require_text(content: bytes) -> None:
    """Raise NotText for NULs at the start, which UTF-8 decodes, as in UTF-16 without a mark and in binary files."""
    if b"\0" in content[:64]:
        raise NotText("utf-8", content[:64], 0, 1, "it has NULs")


def explain_bytes(content: bytes) -> str:
    """Return the kind of a file that is not text, from its bytes, and what to do, as the end of a sentence."""
    start = content[:64]
    if start.startswith(_ARCHIVES):
        return "is a spreadsheet or another archive, not text; save its table as CSV UTF-8, comma delimited"
    is_marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not is_marked and (_CONTROLS.search(start) or (0 in start[::2] and 0 in start[1::2])):
        return "is a binary file, not text; name a text file in UTF-8"
    return "is not UTF-8; save it as UTF-8, in Excel as CSV UTF-8"


def read_bytes(path: PathLike, most: int = MOST_DATA) -> bytes:
    """Return the content of a file, local or at an address such as gs://; OSError if it has more than `most` bytes."""
    if os.fspath(path).startswith(("https://", "http://")):
        raise OSError(errno.EINVAL, "it is an address of the web; download the file and give its path")
    if "://" in os.fspath(path):
        return _read_remote(path, most)
    with open_regular(path) as file:
        _refuse_more(os.fstat(file.fileno()).st_size, most)  # unread
        return read_stream(file, most)


def read_stream(file: BinaryIO, most: int) -> bytes:
    """Return the remaining content of an open file or pipe; OSError if it has more than `most` bytes."""
    content = bytearray()
    while piece := file.read(MIB):
        content += piece
        _refuse_more(len(content), most)
    return bytes(content)


def _read_remote(path: PathLike, most: int) -> bytes:
    from etils import epath  # here, because --help does without it

    try:
        place = epath.Path(path)
        _refuse_more(place.stat().length, most)
        return place.read_bytes()
    except Exception as error:  # each store's library raises its own types, and etils ImportError without it
        raise OSError(getattr(error, "errno", 0) or errno.EIO, reason_of(error)) from error


def _refuse_more(size: int, most: int) -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")


def file_sha256(path: PathLike) -> str:
    """Return the sha256 of a file as a hexadecimal string. The file is local or at an address such as gs://."""
    from etils import epath  # here, because --help does without it

    with epath.Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_to_append(path: PathLike) -> BinaryIO:
    """Open a local file for appending, in binary mode; UserError if it is a symbolic link.

    All other writes replace a file by a new one. Appending changes a file in place, so it must not follow a link.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.fdopen(os.open(path, flags, 0o666), "ab")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a symbolic link; remove it") from error
        raise


@contextlib.contextmanager
def damage_explained(path: Any) -> Iterator[None]:
    """Convert any error in the block to a UserError that names the file `path`.

    The block should read, parse and convert every value that is used later, and do nothing else.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}") from error
    except Exception as error:  # parsers raise errors of many types for truncated or changed content
        if isinstance(error, NotText):
            raise UserError(f"{path} {explain_bytes(error.object)}") from error
        reason = f"{'it has no ' if isinstance(error, KeyError) else ''}{reason_of(error)}"
        raise UserError(f"{path} is damaged: {reason}") from error


def disk_error(error: BaseException, place: object = "") -> DiskError | None:
    """Return a DiskError if a full, read-only or failing disk caused `error` or one of its causes, otherwise None.

    `place` is the file or folder that was written, by default the path in the error.
    """
    if isinstance(error, UserError):  # its text is the reason already
        return error if isinstance(error, DiskError) else None
    cause: BaseException | None = error
    while cause is not None:
        if number := _find_errno(cause):
            path = place or getattr(cause, "filename", None) or "to the disk"
            return DiskError(f"cannot write {path}: {os.strerror(number)}; {_REMEDIES[number]}")
        cause = cause.__cause__
    return None


def _find_errno(error: BaseException) -> int | None:
    """Return the errno of an error if it is a key of _REMEDIES, otherwise None.

    C++ libraries raise other exception types, so the error message is also searched for the text of such an errno.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _REMEDIES else None
    text = str(error)
    return next((number for number in _REMEDIES if os.strerror(number) in text), None)


@contextlib.contextmanager
def disk_errors_explained(place: object) -> Iterator[None]:
    """Convert an error in the block to a DiskError at `place`, if a full, read-only or failing disk caused it."""
    try:
        yield
    except Exception as error:
        if (reason := disk_error(error, place)) is None:
            raise
        raise reason from error
