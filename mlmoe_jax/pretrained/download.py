"""Download published weights into the cache folder: resumable, checked, and never visible before they are complete.

During the download of NAME its folder holds NAME.part (the bytes so far), NAME.part.json (the address, version and
length of the whole file) and NAME.lock; afterwards NAME, and NAME.sha256 in the format of sha256sum, which pins the
content.
"""

import contextlib
import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmoe_jax.errors import NoRoom, UserError
from mlmoe_jax.pretrained import web
from mlmoe_jax.pretrained.web import (
    SHA256,
    Lost,
    Refused,
    Source,
    Stale,
    find_source,
    open_source,
    read_chunk,
    version_of,
)
from mlmoe_jax.runtime.progress import Meter, megabytes, status

PAUSES = (1.0, 3.0, 10.0, 30.0)  # seconds before each retry; starts again whenever a chunk has arrived
LONGEST_PAUSE = 120.0  # seconds; upper limit of a pause that a server requests
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

pause = time.sleep  # a separate name, so that tests can replace it


class Unreachable(UserError):
    """The file cannot be downloaded; a copy that the user puts in its place works as well."""


@dataclass(frozen=True)
class _Order:
    """A requested file. sha256, size: given by the caller. pinned: sha256 of an earlier download. Empty: unknown.

    sha256 may be the first digits only; `pinned` is empty unless it begins with them. quiet: do not tell its success.
    """

    address: str
    target: Path
    sha256: str
    size: int
    pinned: str
    quiet: bool

    def tell(self, text: str) -> None:
        """Log a message unless the order is quiet."""
        if not self.quiet:
            status(text)


# ---------------------------------------------------------------------------------------------------------- interface
def fetch(address: str, target: Path, *, sha256: str = "", size: int = 0, quiet: bool = False) -> Path:
    """Download a file to `target` unless it exists already, and return `target`.

    sha256, size: of the published file, if known. Of the sha256 the first digits are enough, such as PyTorch's
    convention puts into names of files. quiet: tell failures and retries only. The first download is pinned. An
    interrupted download is resumed. Raises Unreachable if the file cannot be downloaded, and UserError if it cannot be
    stored or is not the expected one.
    """
    if target.is_file():
        check_pinned(target, sha256=sha256)
        return target
    pinned = _read_pin(target)
    pinned = pinned if pinned.startswith(sha256.lower()) else ""
    order = _Order(address, target, sha256.lower(), size, pinned, quiet)
    if os.environ.get("MLMOE_OFFLINE", "") not in ("", "0"):
        raise _unreachable(order, "MLMOE_OFFLINE is set")
    part = _Part(target)
    with _disk_errors(target), _locked(target), _part_dropped_on_full_disk(part):
        if target.is_file():  # downloaded by another process, while this one waited
            check_pinned(target, sha256=sha256)
        else:
            _keep(order, part, expected=_download(order, part))
    return target


def check_pinned(target: Path, *, sha256: str = "") -> None:
    """Raise UserError unless a file has the given sha256, and the one pinned when it was downloaded.

    sha256 may be the first digits; a pin that does not begin with them is ignored. Without either, as for a file that
    the user put there, the check passes.
    """
    given, pinned = sha256.lower(), _read_pin(target)
    expected = pinned if pinned.startswith(given) else given
    if not expected:
        return
    try:
        found = _sha256_of(target)
    except OSError as error:
        raise UserError(f"cannot read {target}: {error.strerror or error}") from error
    if not found.startswith(expected):
        keep = "" if given == expected else f", or {_pin_of(target)} if the replacement is intended"
        raise UserError(
            f"{target} is damaged or has been replaced, as its sha256 is {found[:12]}… instead of {expected[:12]}…; "
            f"delete it so that it is downloaded again{keep}"
        )


# ----------------------------------------------------------------------------------------------------- retries, errors
def _download(order: _Order, part: "_Part") -> str:
    """Complete the part, retrying after temporary failures; return the sha256 it should have, or ''."""
    tries, furthest, answered = 0, 0, False
    while True:
        try:
            return _attempt(order, part)
        except Refused as refused:
            raise _unreachable(order, str(refused)) from refused
        except Lost as lost:
            have = part.length
            answered |= lost.answered
            if have >= furthest + web.CHUNK:
                tries, furthest = 0, have
            # Without a network, fail soon and not only after all the pauses.
            pauses = PAUSES if answered else PAUSES[:1]
            if tries == len(pauses):
                again = f"{lost}, and retrying did not help"
                kept, _ = part.resumable(order.address, "")
                later = f" (the next start resumes at {megabytes(kept)})" if kept else ""
                raise _unreachable(order, again + later) from lost
            wait = max(pauses[tries], min(lost.wait, LONGEST_PAUSE))
            tries += 1
            status(f"{order.target.name}: {lost}; retrying in {wait:.0f} s")
            pause(wait)


def _unreachable(order: _Order, reason: str) -> Unreachable:
    return Unreachable(
        f"{order.target.name} is not in {order.target.parent} and cannot be downloaded from {order.address}, because "
        f"{reason}; put a copy of the file at {order.target}"
    )


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Make the folder, and turn disk errors into UserErrors."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        elsewhere = "set MLMOE_CACHE to another folder"
        if error.errno in _NO_SPACE:
            raise NoRoom(
                f"the disk became full during the download of {target}, and the partial file was deleted; free some "
                f"space or {elsewhere}"
            ) from error
        raise UserError(f"cannot write {target}: {error.strerror or error}; {elsewhere}") from error


@contextlib.contextmanager
def _part_dropped_on_full_disk(part: "_Part") -> Iterator[None]:
    """Delete the part if the disk is full: a training run needs the space, and the part can be downloaded again."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            part.drop()
        raise


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process or thread at a time download a file; the others wait and then find it in place."""
    path = _with_suffix(target, ".lock")
    while True:
        with open(path, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                status(f"another process is downloading {target.name}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same_file(path, lock.fileno()):  # its last owner deleted it, and others may hold a new one
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                # Closing does not unlock while a forked process also has the lock open.
                fcntl.flock(lock, fcntl.LOCK_UN)
            return


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------------- the transfer
def _attempt(order: _Order, part: "_Part") -> str:
    """Complete the part without retries, or raise Lost or Refused; return the sha256 it should have, or ''."""
    source = find_source(order.address)
    expected = order.pinned or order.sha256 or source.sha256
    if source.sha256 and not source.sha256.startswith(expected):
        part.drop()
        raise _not_the_expected(order, "the published file", source.sha256, expected)
    try:
        _receive(order, source, part)
    except Stale:
        status(f"{order.target.name} has changed at {order.address}; starting over")
        part.drop()
        _receive(order, source, part)
    return expected


def _receive(order: _Order, source: Source, part: "_Part") -> None:
    offset, notes = part.resumable(order.address, source.version)
    if offset and offset == notes["length"]:  # interrupted between the last byte and the move
        return
    with open_source(source, offset, notes.get("version", "")) as response:
        resumed = offset > 0 and response.status == http.client.PARTIAL_CONTENT
        if resumed:
            _require_continuation(response, offset, notes, source)
        length = notes["length"] if resumed else _length_of(response, order, source)
        _require_space(order, length - part.length)
        if not resumed:
            offset = 0
            part.begin(address=order.address, version=source.version or version_of(response), length=length)
        resuming = f", resuming at {megabytes(offset)}" if offset else ""
        size = megabytes(length) if length else "? MB"
        order.tell(f"downloading {order.address} ({size}) to {order.target}{resuming}")
        with (
            open(part.path, "r+b") as file,
            contextlib.closing(Meter(order.target.name, offset, length)) as meter,
        ):
            file.seek(offset)
            while chunk := read_chunk(response):
                file.write(chunk)
                meter.add(len(chunk))
    if length and part.length != length:
        raise Lost(f"the connection was lost after {megabytes(part.length)} of {megabytes(length)}")


# ----------------------------------------------------------------------------------------------------- response headers
def _length_of(response: http.client.HTTPResponse, order: _Order, source: Source) -> int:
    """Return the length of the file that a response announces, or 0 if none; raise if it is not the file."""
    if response.headers.get_content_type() == "text/html":
        raise Refused("the response is a web page and not a file (perhaps the login page of a network or proxy)")
    length = response.length or 0
    known = order.size or source.size
    if length and known and length != known:
        raise UserError(
            f"{order.address} has {length:,} bytes instead of the expected {known:,}, so it is now a different file; "
            f"put the right one at {order.target}"
        )
    if not (length or known or order.sha256 or order.pinned or source.sha256):
        raise Refused("the server does not give the length of the file, so a broken download could not be detected")
    return length or known


def _require_continuation(
    response: http.client.HTTPResponse, offset: int, notes: Mapping[str, Any], source: Source
) -> None:
    """Raise Stale unless a response continues the part, even if the server ignored If-Range."""
    given = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range") or "")
    at_offset = given and int(given[1]) == offset and given[2] in ("*", str(notes["length"]))
    present = "" if source.version else version_of(response)
    if not at_offset or (present and present != notes["version"]):
        raise Stale


def _require_space(order: _Order, needed: int) -> None:
    folder = order.target.parent
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed:  # some network folders report 0 of 0
        raise UserError(
            f"there is not enough space for {order.target.name}: it needs {megabytes(needed)} and {folder} has "
            f"{megabytes(usage.free)} free; free some space or set MLMOE_CACHE to another folder"
        )


# ------------------------------------------------------------------------------------------------------------ the disk
class _Part:
    """The bytes that have arrived, and a file of notes about the whole that they are a part of."""

    def __init__(self, target: Path):
        self.path, self.notes = _with_suffix(target, ".part"), _with_suffix(target, ".part.json")

    @property
    def length(self) -> int:
        """The number of bytes that have arrived."""
        return self.path.stat().st_size if self.path.exists() else 0

    def begin(self, **notes: str | int) -> None:
        """Start an empty part; the old bytes are deleted first, so that they never coexist with the new notes."""
        self.path.write_bytes(b"")
        self.notes.write_text(json.dumps(notes))

    def resumable(self, address: str, version: str) -> tuple[int, dict[str, Any]]:
        """Return the number of bytes to resume from, and the notes; 0 and {} if there is nothing to resume."""
        try:
            notes = json.loads(self.notes.read_text())
            same = notes["address"] == address and notes["version"] == (version or notes["version"])
            good = same and notes["version"] and self.length <= notes["length"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            good = False
        return (self.length, notes) if good else (0, {})

    def drop(self) -> None:
        """Delete the part and its notes."""
        self.path.unlink(missing_ok=True)
        self.notes.unlink(missing_ok=True)


def _keep(order: _Order, part: _Part, *, expected: str) -> None:
    """Check the complete part, pin its sha256 and move it into place."""
    target = order.target
    with open(part.path, "rb") as file:
        os.fsync(file.fileno())
    size, found = part.length, _sha256_of(part.path)
    if not found.startswith(expected):
        part.drop()
        raise _not_the_expected(order, "the download, which was deleted,", found, expected, "start again")
    # The pin first: then every file in place can be checked later, and a pin without a file does no harm.
    with open(_pin_of(target), "w") as file:
        file.write(f"{found}  {target.name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part.path, target)
    part.drop()
    with contextlib.suppress(OSError):  # not every file system can flush a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    order.tell(f"downloaded {target} ({megabytes(size)}, sha256 {found[:12]}…)")


def _not_the_expected(order: _Order, what: str, found: str, expected: str, *remedies: str) -> UserError:
    """Return the error for a file whose sha256 is not the given, pinned or published one."""
    known = "that was given" if order.sha256 else "of the first download" if order.pinned else "that is published"
    if order.pinned and not order.sha256:
        remedies += (f"delete {_pin_of(order.target)} if the new file is right",)
    return UserError(
        f"{order.address} does not provide the expected {order.target.name}: {what} has the sha256 {found[:12]}… "
        f"instead of the {expected[:12]}… {known}; "
        f"{', or '.join([*remedies, f'put the right file at {order.target}'])}"
    )


def _with_suffix(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _pin_of(target: Path) -> Path:
    return _with_suffix(target, ".sha256")


def _read_pin(target: Path) -> str:
    """Return the pinned sha256 of a file, or ''."""
    try:
        found = SHA256.match(_pin_of(target).read_text())
    except (OSError, ValueError):
        return ""
    return found[0] if found else ""


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
