"""Published weights from the network into the cache folder: resumed where they broke off, checked, never half there.

While NAME is under way its folder holds NAME.part (the bytes so far), NAME.part.json (what they are a part of) and
NAME.lock; afterwards NAME, and NAME.sha256 in the format of sha256sum, which pins what was downloaded.
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

from mlmoe_jax.errors import UserError
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
from mlmoe_jax.runtime.progress import Meter, megabytes, say

PAUSES = (1.0, 3.0, 10.0, 30.0)  # seconds before each new try; counted anew whenever a chunk has arrived
LONGEST_PAUSE = 120.0  # of those that a server may ask for
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

pause = time.sleep  # a name of its own, so that tests need not wait


class Unreachable(UserError):
    """The network does not give the file; a copy that is put in its place by hand serves as well."""


@dataclass(frozen=True)
class _Order:
    """What is wanted. sha256, size: as given by the caller. pinned: sha256 of an earlier download. Empty: unknown."""

    address: str
    target: Path
    sha256: str
    size: int
    pinned: str


# --------------------------------------------------------------------------------------------------- what others call
def fetch(address: str, target: Path, *, sha256: str = "", size: int = 0) -> Path:
    """Download a file to `target` unless it is there already, and return `target`.

    sha256, size: of the published file, where they are known; otherwise the first download is pinned. A download that
    was interrupted goes on where it stopped. Raises Unreachable where the network does not give the file, and
    UserError where it cannot be stored or is not the expected one.
    """
    if target.is_file():
        check_pinned(target, sha256=sha256)
        return target
    order = _Order(address, target, sha256.lower(), size, pinned=_read_pin(target))
    if os.environ.get("MLMOE_OFFLINE", "") not in ("", "0"):
        raise _unreachable(order, "MLMOE_OFFLINE forbids the network")
    part = _Part(target)
    with _disk_errors(target), _alone(target), _room_given_back(part):
        if target.is_file():  # by another process, while this one waited
            check_pinned(target, sha256=sha256)
        else:
            _keep(order, part, expected=_download(order, part))
    return target


def check_pinned(target: Path, *, sha256: str = "") -> None:
    """Raise UserError unless a file has the given sha256, or else the one that was pinned when it was downloaded.

    A file with neither, such as one that was put there by hand, passes.
    """
    expected = sha256.lower() or _read_pin(target)
    if not expected:
        return
    try:
        found = _sha256_of(target)
    except OSError as error:
        raise UserError(f"cannot read {target}: {error.strerror or error}") from error
    if found != expected:
        keep = "" if sha256 else f", or {_pin_of(target)} if this file is meant to be another one"
        raise UserError(
            f"{target} is damaged or has been replaced, as its sha256 is {found[:12]}… instead of {expected[:12]}…; "
            f"delete it so that it is downloaded again{keep}"
        )


# ------------------------------------------------------------------------------------------------------- tries, errors
def _download(order: _Order, part: "_Part") -> str:
    """Complete the part, with new tries after failures that may pass; return the sha256 it should have, or ''."""
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
            # Without a network the answer should come soon, not after all the pauses.
            pauses = PAUSES if answered else PAUSES[:1]
            if tries == len(pauses):
                again = f"{lost}, and trying again did not help"
                kept, _ = part.resumable(order.address, "")
                later = f" (a later start goes on from {megabytes(kept)})" if kept else ""
                raise _unreachable(order, again + later) from lost
            wait = max(pauses[tries], min(lost.wait, LONGEST_PAUSE))
            tries += 1
            say(f"{order.target.name}: {lost}; trying again in {wait:.0f} s")
            pause(wait)


def _unreachable(order: _Order, reason: str) -> Unreachable:
    return Unreachable(
        f"{order.target.name} is not in {order.target.parent} and could not be fetched from {order.address}, because "
        f"{reason}; put a copy of the file at {order.target}"
    )


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Make the folder, and turn what goes wrong on the disk into sentences."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        elsewhere = "name another folder with MLMOE_CACHE"
        if error.errno in _NO_SPACE:
            raise UserError(
                f"the disk became full while {target} was downloaded, and what had arrived was deleted; free some "
                f"space or {elsewhere}"
            ) from error
        raise UserError(f"cannot write {target}: {error.strerror or error}; {elsewhere}") from error


@contextlib.contextmanager
def _room_given_back(part: "_Part") -> Iterator[None]:
    """Delete the part when the disk is full: a training needs the room more than what can be downloaded again."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            part.drop()
        raise


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Let one process or thread at a time download a file; those that wait find it in place."""
    path = _beside(target, ".lock")
    while True:
        with open(path, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is downloading {target.name}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_still(path, lock.fileno()):  # who had it has deleted it, and others may hold a new one
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                # Closing does not unlock while a forked process has the lock open too.
                fcntl.flock(lock, fcntl.LOCK_UN)
            return


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------------- the transfer
def _attempt(order: _Order, part: "_Part") -> str:
    """Complete the part in one go, or raise Lost, Refused; return the sha256 it should have, or ''."""
    source = find_source(order.address)
    expected = order.sha256 or order.pinned or source.sha256
    if source.sha256 and source.sha256 != expected:
        part.drop()
        raise _not_the_expected(order, "what it publishes", source.sha256, expected)
    try:
        _receive(order, source, part)
    except Stale:
        say(f"{order.target.name} has changed at {order.address}; starting again")
        part.drop()
        _receive(order, source, part)
    return expected


def _receive(order: _Order, source: Source, part: "_Part") -> None:
    offset, notes = part.resumable(order.address, source.version)
    if offset and offset == notes["length"]:  # stopped between the last byte and the move
        return
    with open_source(source, offset, notes.get("version", "")) as response:
        going_on = offset > 0 and response.status == http.client.PARTIAL_CONTENT
        if going_on:
            _require_continuation(response, offset, notes, source)
        length = notes["length"] if going_on else _length_of(response, order, source)
        _require_room(order, length - part.length)
        if not going_on:
            offset = 0
            part.begin(address=order.address, version=source.version or version_of(response), length=length)
        from_there = f" from {megabytes(offset)} on" if offset else ""
        say(f"downloading {order.address} ({megabytes(length) if length else '? MB'}) to {order.target}{from_there}")
        with (
            open(part.path, "r+b") as file,
            contextlib.closing(Meter(order.target.name, offset, length)) as meter,
        ):
            file.seek(offset)
            while chunk := read_chunk(response):
                file.write(chunk)
                meter.add(len(chunk))
    if length and part.length != length:
        raise Lost(f"the connection broke off at {megabytes(part.length)} of {megabytes(length)}")


# -------------------------------------------------------------------------------------------------- what an answer says
def _length_of(response: http.client.HTTPResponse, order: _Order, source: Source) -> int:
    """Return the length of the file that an answer announces, or 0; raise where it is not the file."""
    if response.headers.get_content_type() == "text/html":
        raise Refused("the answer is a web page and not a file (perhaps the login page of a network or proxy)")
    length = response.length or 0
    known = order.size or source.size
    if length and known and length != known:
        raise UserError(
            f"{order.address} has {length:,} bytes and not the {known:,} that are expected, so that it is another file "
            f"now; put the right one at {order.target}"
        )
    if not (length or known or order.sha256 or order.pinned or source.sha256):
        raise Refused("the server does not say how long the file is, so that a broken download would go unnoticed")
    return length or known


def _require_continuation(
    response: http.client.HTTPResponse, offset: int, notes: Mapping[str, Any], source: Source
) -> None:
    """Raise Stale unless an answer goes on with the part, also where a server has not heeded If-Range."""
    given = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range") or "")
    at_offset = given and int(given[1]) == offset and given[2] in ("*", str(notes["length"]))
    present = "" if source.version else version_of(response)
    if not at_offset or (present and present != notes["version"]):
        raise Stale


def _require_room(order: _Order, needed: int) -> None:
    folder = order.target.parent
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed:  # some network folders report 0 of 0
        raise UserError(
            f"there is no room for {order.target.name}: it needs {megabytes(needed)} and {folder} has "
            f"{megabytes(usage.free)} free; free some space or name another folder with MLMOE_CACHE"
        )


# ------------------------------------------------------------------------------------------------------------ the disk
class _Part:
    """The bytes that have arrived, and beside them what they are a part of."""

    def __init__(self, target: Path):
        self.path, self.notes = _beside(target, ".part"), _beside(target, ".part.json")

    @property
    def length(self) -> int:
        """The number of bytes that are there."""
        return self.path.stat().st_size if self.path.exists() else 0

    def begin(self, **notes: str | int) -> None:
        """Start an empty part; the old bytes go first, so that they never lie beside the new notes."""
        self.path.write_bytes(b"")
        self.notes.write_text(json.dumps(notes))

    def resumable(self, address: str, version: str) -> tuple[int, dict[str, Any]]:
        """Return the number of bytes to go on from, and the notes; 0 and {} where there is nothing to go on with."""
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
    if found != (expected or found):
        part.drop()
        raise _not_the_expected(order, "what arrived, and was deleted,", found, expected, "start again")
    # The pin first: a file that is in place is always checked later, and a pin without a file does no harm.
    with open(_pin_of(target), "w") as file:
        file.write(f"{found}  {target.name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part.path, target)
    part.drop()
    with contextlib.suppress(OSError):  # not every file system lets a folder be flushed
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    say(f"downloaded {target} ({megabytes(size)}, sha256 {found[:12]}…)")


def _not_the_expected(order: _Order, what: str, found: str, expected: str, *remedies: str) -> UserError:
    """Return the error for a file with another sha256 than was given, pinned or published."""
    known = "that was given" if order.sha256 else "of the first download" if order.pinned else "that is published"
    if order.pinned and not order.sha256:
        remedies += (f"delete {_pin_of(order.target)} if the new file is right",)
    return UserError(
        f"{order.address} does not give the expected {order.target.name}: {what} has the sha256 {found[:12]}… instead "
        f"of the {expected[:12]}… {known}; {', or '.join([*remedies, f'put the right file at {order.target}'])}"
    )


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(target.name + ending)


def _pin_of(target: Path) -> Path:
    return _beside(target, ".sha256")


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
