"""Download published weights into the cache folder. Downloads are resumed and checked before they become visible.

During the download of NAME, its folder has NAME.part (the bytes so far) and NAME.part.json (the address, version and
length of the whole file). Afterwards it has NAME, and NAME.sha256 in the format of sha256sum, which pins the content.
"""

import contextlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlmoe_jax.errors import DiskError, UserError
from mlmoe_jax.pretrained import hub
from mlmoe_jax.pretrained.hub import NoAnswer, Refused
from mlmoe_jax.runtime.files import disk_errors_explained, sha256_of
from mlmoe_jax.runtime.progress import Meter, megabytes, status
from mlmoe_jax.runtime.storage import Folder

CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds, for connecting and for every read
PAUSES = (1.0, 3.0, 10.0)  # seconds before each retry; starts again after each chunk
LONGEST_PAUSE = 120.0  # seconds; upper limit of a pause that a server requests
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP status codes

pause = time.sleep  # a name that tests can replace


class Unreachable(UserError):
    """The file cannot be downloaded. A copy that the user puts in its place works too."""


class _Changed(NoAnswer):
    """The file on the server has changed since an earlier attempt."""


# ---------------------------------------------------------------------------------------------------------- interface
def fetch(address: str, target: Path, *, sha256: str = "") -> Path:
    """Download a file to `target` unless it exists already, and return `target`.

    The first download pins the content. An interrupted download is resumed.

    Args:
      address: an https address, or http on this machine.
      target: path of the file.
      sha256: the sha256 of the published file, if known, or its first digits, which PyTorch puts into names of files.

    Raises:
      Unreachable: the file cannot be downloaded.
      UserError: the file cannot be stored, or is not the expected file.
    """
    if not target.is_file():
        if os.environ.get("MLMOE_OFFLINE", "") not in ("", "0"):
            raise _unreachable(address, target, "MLMOE_OFFLINE is set")
        with _writing(target):
            if not target.is_file():  # another process may have downloaded it in the meantime
                _download(address, target, sha256)
                return target
    check_pinned(target, sha256=sha256)
    return target


def check_pinned(target: Path, *, sha256: str = "") -> None:
    """Raise UserError unless the sha256 of a file is the published sha256 and the sha256 of its download.

    Args:
      target: path of the file. Without `sha256` and a pin, as for a file from the user, the check passes.
      sha256: the published sha256 or its first digits. A pin that does not begin with these digits is ignored.
    """
    expected = _expected(target, sha256)
    if expected and not (actual := sha256_of(target)).startswith(expected):
        keep = "" if expected == sha256.lower() else f", or {_beside(target, '.sha256')} if the replacement is intended"
        raise UserError(
            f"{target} is damaged or has been replaced, as its sha256 is {actual[:12]}… instead of {expected[:12]}…; "
            f"delete it so that it is downloaded again{keep}"
        )


def _expected(target: Path, sha256: str) -> str:
    """Return the pinned sha256 of a file if it begins with the digits `sha256`, otherwise `sha256`."""
    pin = _beside(target, ".sha256")
    pinned = re.match(r"[0-9a-f]{64}", pin.read_text(errors="replace")) if pin.is_file() else None
    return pinned[0] if pinned and pinned[0].startswith(sha256.lower()) else sha256.lower()


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Let only one process at a time write to the folder of a file, and explain disk errors."""
    try:
        with disk_errors_explained(target), Folder(target.parent).writing(wait=True):
            yield
    except DiskError:  # frees space, and the part can be downloaded again
        _beside(target, ".part").unlink(missing_ok=True)
        raise
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write {target}: {reason}; set MLMOE_CACHE to another folder") from error


def _unreachable(address: str, target: Path, reason: str) -> Unreachable:
    return Unreachable(
        f"{target.name} is not in {target.parent} and cannot be downloaded from {address}, because {reason}; put a "
        f"copy of the file at {target}"
    )


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


# ------------------------------------------------------------------------------------------------------- the download
def _download(address: str, target: Path, sha256: str) -> None:
    """Complete the part, with retries after temporary failures, then check, pin and move it into place."""
    part, tries = _beside(target, ".part"), 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            location, headers, published = hub.locate(address)
            expected = _expected(target, sha256) or published
            _receive(location, headers, target, checked=bool(expected))
            break
        except Refused as refused:
            raise _unreachable(address, target, str(refused)) from refused
        except NoAnswer as lost:
            if isinstance(lost, _Changed):
                _drop(part)
            tries = 0 if part.exists() and part.stat().st_size >= before + CHUNK else tries
            if tries == len(PAUSES):
                raise _unreachable(address, target, f"{lost}, and retrying did not help") from lost
            wait = max(PAUSES[tries], min(lost.wait, LONGEST_PAUSE))
            tries += 1
            status(f"{target.name}: {lost}; retrying in {wait:.0f} s")
            pause(wait)
    actual = sha256_of(part)
    if not actual.startswith(expected):
        _drop(part)
        raise UserError(
            f"{address} does not provide the expected {target.name}: the download, which was deleted, has the sha256 "
            f"{actual[:12]}… instead of {expected[:12]}…; start again, put the right file at {target}, or delete "
            f"{_beside(target, '.sha256')} if the new file is right"
        )
    # The pin is written first, so that every file in place can be checked later. A pin without a file does no harm.
    _beside(target, ".sha256").write_text(f"{actual}  {target.name}\n")
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
    _drop(part)
    status(f"downloaded {target} ({megabytes(target.stat().st_size)}, sha256 {actual[:12]}…)")


def _drop(part: Path) -> None:
    part.unlink(missing_ok=True)
    _beside(part, ".json").unlink(missing_ok=True)


def _receive(location: str, headers: Mapping[str, str], target: Path, *, checked: bool) -> None:
    """Complete the part without retries. `checked` says whether the sha256 of the file is known."""
    part = _beside(target, ".part")
    notes, offset = _resumable(part, location)
    if offset and offset == notes["length"]:  # interrupted between the last byte and the move
        return
    if offset:
        headers = {**headers, "Range": f"bytes={offset}-", "If-Range": notes["version"]}
    with _open(location, headers) as response:
        version, length = _version_of(response), response.length or 0
        if offset and response.status == http.client.PARTIAL_CONTENT:
            begins = (response.headers.get("Content-Range") or "").startswith(f"bytes {offset}-")
            if not begins or version not in ("", notes["version"]):  # the server ignored If-Range
                raise _Changed("the file has changed")
            length = notes["length"]
        else:
            if response.headers.get_content_type() == "text/html":
                raise Refused("the response is a web page and not a file (perhaps the login page of a network)")
            if not length and not checked:
                raise Refused("the server does not give the length of the file, so damage could not be detected")
            # The old bytes are deleted first, so that they never stand beside new notes.
            offset = part.write_bytes(b"")
            notes = {"address": location, "version": version, "length": length}
            _beside(part, ".json").write_text(json.dumps(notes))
        resuming = f", resuming at {megabytes(offset)}" if offset else ""
        status(f"downloading {location} ({megabytes(length) if length else '? MB'}) to {target}{resuming}")
        with open(part, "ab") as file, contextlib.closing(Meter(target.name, offset, length)) as meter:
            while chunk := _read(response):
                file.write(chunk)
                meter.add(len(chunk))
    if length and (size := part.stat().st_size) != length:
        raise NoAnswer(f"the connection was lost after {megabytes(size)} of {megabytes(length)}")


def _resumable(part: Path, location: str) -> tuple[dict[str, Any], int]:
    """Return the notes and the number of bytes to resume from; {} and 0 if there is nothing to resume."""
    try:
        notes, size = json.loads(_beside(part, ".json").read_text()), part.stat().st_size
        good = notes["address"] == location and notes["version"] and size <= notes["length"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        good = False
    return (notes, size) if good else ({}, 0)


def _version_of(response: http.client.HTTPResponse) -> str:
    """Return the value for If-Range that identifies the content: a strong ETag or the modification time."""
    tag = response.headers.get("ETag") or ""
    return tag if tag.startswith('"') else response.headers.get("Last-Modified") or ""


# ------------------------------------------------------------------------------------------------------------ requests
class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects that stay on https, without sending a token to another host."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        _require_safe(newurl)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and following.host != req.host:
            following.remove_header("Authorization")
        return following


def _require_safe(address: str) -> None:
    if not hub.is_safe(address):
        raise Refused(f"'{address}' is not an https address")


def _open(location: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """Request a file. urllib handles proxies, redirects and certificates, and is always installed."""
    _require_safe(location)
    request = urllib.request.Request(location, headers={"User-Agent": "mlmoe_jax", **headers})
    try:
        return urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            meaning = {401: " (login required)", 403: " (access denied)", 404: " (file not found)"}
            reason = f"the server responds with {error.code}{meaning.get(error.code, '')}"
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise _Changed("the file has changed") from error
            if error.code in _TEMPORARY:
                raise NoAnswer(reason, error.headers.get("Retry-After") or "") from error
            raise Refused(reason) from error
    except (OSError, http.client.HTTPException) as error:
        host = urllib.parse.urlsplit(location).hostname
        raise NoAnswer(f"{host} cannot be reached ({hub.brief(error)})") from error


def _read(response: http.client.HTTPResponse) -> bytes:
    """Return the next bytes of a response, b"" at its end."""
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"the connection was lost ({hub.brief(error)})") from error
