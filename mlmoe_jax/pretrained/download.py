"""Download published weights into the cache folder, from the Hugging Face hub or from another https server.

Beside NAME, its folder has NAME.sha256 in the format of sha256sum, which pins the content of the first download. A
download from another server than the hub is resumed: until it is complete, the folder has NAME.part, the bytes so far,
and NAME.part.version, which identifies the file on the server.
"""

import http.client
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.pretrained import hub
from mlmoe_jax.pretrained.hub import NoAnswer, Refused
from mlmoe_jax.runtime.files import disk_errors_explained, file_sha256, open_to_append
from mlmoe_jax.runtime.progress import DownloadBar, megabytes, status
from mlmoe_jax.runtime.storage import Folder

READ_BYTES = 1 << 20  # the most that is read at once
TIMEOUT = 30.0  # seconds, for connecting and for every read
PAUSES = (1.0, 3.0, 10.0)  # seconds before each retry
_TEMPORARY = (408, 416, 425, 429, 500, 502, 503, 504)  # HTTP status codes
_MEANINGS = {401: " (login required)", 403: " (access denied)", 404: " (file not found)"}
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

pause = time.sleep  # a name that tests can replace


class Unreachable(UserError):
    """An error: the file cannot be downloaded. Putting a copy of the file at the target path fixes it too."""


# ---------------------------------------------------------------------------------------------------------- interface
def fetch(address: str, target: Path, *, sha256: str = "") -> Path:
    """Download a file to `target` unless `target` exists already. Return `target`.

    Args:
      address: an https address, or an http address on this machine.
      target: path of the file.
      sha256: the sha256 of the published file, or its first digits, which PyTorch writes into file names. "" if it is
        unknown.

    Raises:
      Unreachable: the file cannot be downloaded.
      UserError: the file cannot be stored, or its sha256 differs.
    """
    if not target.is_file():
        try:
            hub.require_online()
            with disk_errors_explained(target), Folder(target.parent).writing(wait=True):
                if not target.is_file():  # another process may have downloaded it in the meantime
                    _download(address, target, sha256)
                    return target
        except (NoAnswer, Refused) as error:
            raise Unreachable(
                f"{target.name} is not in {target.parent} and cannot be downloaded from {address}, because {error}; "
                f"put a copy of the file at {target}"
            ) from error
    if sha256 or _pin(target).is_file():  # not for a copy that the user has put there
        _require_sha256(target, target, sha256)
    return target


def _require_sha256(file: Path, target: Path, sha256: str) -> str:
    """Return the sha256 of `file` as a hexadecimal string.

    Args:
      file: the file to check.
      target: the path at which the file is or will be stored. If `target`.sha256 exists, it has the expected sha256.
      sha256: the expected sha256 or its first digits, used if `target`.sha256 does not exist. "" accepts any file.

    Raises:
      UserError: the sha256 differs from the expected sha256.
    """
    pin = _pin(target)
    expected = pin.read_text().partition(" ")[0] if pin.is_file() else sha256
    actual = file_sha256(file)
    if not actual.startswith(expected):
        raise UserError(
            f"{file} is damaged or has been replaced, as its sha256 is {actual[:12]}… instead of {expected[:12]}…; "
            f"delete it so that it is downloaded again, or {pin} if the replacement is intended"
        )
    return actual


def _pin(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


# ------------------------------------------------------------------------------------------------------- the download
def _download(address: str, target: Path, sha256: str) -> None:
    """Download a file, check its sha256, store the sha256 in `target`.sha256 and move the file to `target`."""
    part = _part(target)
    if match := hub.FILE.fullmatch(address):
        file = hub.download_file(match, part)
    else:
        file = part
        _receive_with_retries(address, part)
    digest = _require_sha256(file, target, sha256)
    # The pin is written first, so that every file in place can be checked later. A pin without a file does no harm.
    Folder(target.parent).write_text(_pin(target).name, f"{digest}  {target.name}\n")
    os.replace(file, target)
    _remove(part)
    status(f"downloaded {target} ({megabytes(target.stat().st_size)}, sha256 {digest[:12]}…)")


def _part(target: Path) -> Path:
    """Return the path `target`.part of an incomplete download: a folder for the hub, otherwise a file."""
    return target.with_name(f"{target.name}.part")


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)
    _version_file(part).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------- https
def _receive_with_retries(address: str, part: Path) -> None:
    """Download the missing bytes of the file `part`, and retry after temporary failures, with pauses.

    Raises:
      Refused: the server refuses the request.
      NoAnswer: the last attempt has failed too.
    """
    for seconds in PAUSES:
        try:
            return _receive(address, part)
        except NoAnswer as lost:
            status(f"{part.stem}: {lost}; retrying in {seconds:.0f} s")
            pause(seconds)
    return _receive(address, part)


def _receive(address: str, part: Path) -> None:
    """Request the missing bytes of a file once, and append them to the file `part`."""
    offset = part.stat().st_size if part.is_file() else 0
    version = _version_file(part).read_text() if offset and _version_file(part).is_file() else ""
    headers = {"Range": f"bytes={offset}-", "If-Range": version} if version else {}
    with _open(address, headers, part) as response:
        if response.status != http.client.PARTIAL_CONTENT:
            offset = 0
            _start(part, response)
        elif not _continues(response, offset) or _version(response) not in ("", version):  # they may ignore If-Range
            _remove(part)
            raise NoAnswer("the file has changed")
        length = offset + response.length if response.length else 0
        status(f"downloading {address} to {part.with_suffix('')} from {megabytes(offset)} of {megabytes(length)}")
        bar = DownloadBar(total=length or None, initial=offset, desc=part.stem, unit="B", unit_scale=True)
        _append(response, part, bar)
    size = part.stat().st_size
    if length and size != length:
        raise NoAnswer(f"the connection was lost after {megabytes(size)} of {megabytes(length)}")


def _continues(response: http.client.HTTPResponse, offset: int) -> bool:
    return (response.headers.get("Content-Range") or "").startswith(f"bytes {offset}-")


def _start(part: Path, response: http.client.HTTPResponse) -> None:
    """Prepare a download from the first byte: remove `part`, and store the version of the file on the server.

    Raises Refused if the response is a web page.
    """
    if response.headers.get_content_type() == "text/html":
        raise Refused("the response is a web page and not a file")
    _remove(part)  # first, so that old bytes never stand beside a new version
    Folder(part.parent).write_text(_version_file(part).name, _version(response))


def _append(response: http.client.HTTPResponse, part: Path, bar: DownloadBar) -> None:
    """Append the body of a response to the file `part`, and advance `bar`; NoAnswer if the connection is lost."""
    with open_to_append(part) as file, bar:
        while True:
            try:
                piece = response.read1(READ_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswer(f"the connection was lost ({reason_of(error)})") from error
            if not piece:
                return
            file.write(piece)
            bar.update(len(piece))


def _version(response: http.client.HTTPResponse) -> str:
    """Return a strong ETag, or else the modification time, for the header If-Range; "" if the response has neither."""
    tag = response.headers.get("ETag") or ""
    return tag if tag.startswith('"') else response.headers.get("Last-Modified") or ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects to https addresses only, and to http addresses on this machine."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        try:
            _require_https(newurl)
        except Refused:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_https(address: str) -> None:
    """Raise Refused unless `address` begins with https, or with http and is on this machine."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS):
        raise Refused(f"'{address}' is not an https address")


def _open(address: str, headers: Mapping[str, str], part: Path) -> http.client.HTTPResponse:
    """Send a GET request with urllib, and return the response.

    Args:
      address: the address of the file.
      headers: further headers of the request.
      part: the incomplete file. It is removed if the server responds that the file is shorter than `part`.

    Raises:
      Refused: the server refuses the request.
      NoAnswer: the server cannot be reached, or the failure is temporary.
    """
    _require_https(address)
    request = urllib.request.Request(address, headers={"User-Agent": "mlmoe_jax", **headers})
    try:
        return urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # the file is shorter than the part
            _remove(part)
        failure = NoAnswer if error.code in _TEMPORARY else Refused
        raise failure(f"the server responds with {error.code}{_MEANINGS.get(error.code, '')}") from error
    except (OSError, http.client.HTTPException) as error:
        host = urllib.parse.urlsplit(address).hostname
        reason = reason_of(getattr(error, "reason", error))  # URLError wraps the error of the socket
        raise NoAnswer(f"{host} cannot be reached ({reason})") from error
