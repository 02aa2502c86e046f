"""Requests to web servers: an answer in memory, and a download to the disk, which is resumed where it stopped.

Requests and redirects go to https addresses, or to http addresses on this machine. A request with a token, or to an
address from a client, is for one server only. Its redirects to another server are refused, so no token leaves it.

A download writes PATH, and beside it PATH.version, which identifies the file on the server.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import open_to_append
from mlmoe_jax.runtime.progress import DownloadBar, megabytes, status
from mlmoe_jax.runtime.storage import Folder

READ_BYTES = 1 << 20  # the most that is read at once
TIMEOUT = 30.0  # seconds, for connecting and for every read
PAUSES = (1.0, 3.0, 10.0)  # seconds before each retry of a download
_TEMPORARY = (408, 416, 425, 429, 500, 502, 503, 504)  # HTTP status codes
_MEANINGS = {401: " (login required)", 403: " (access denied)", 404: " (file not found)"}
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

pause = time.sleep  # a name that tests can replace


class NoAnswer(UserError):
    """An error: a server cannot be reached, or its answer is incomplete. A retry may help."""


class Refused(UserError):
    """An error: a server refuses a request, or the request is not allowed. A retry does not help."""


def require_online() -> None:
    """Raise NoAnswer if the environment variable MLMOE_OFFLINE is set to a value other than "" and 0."""
    if os.environ.get("MLMOE_OFFLINE", "") not in ("", "0"):
        raise NoAnswer("MLMOE_OFFLINE is set")


def read_url(
    address: str,
    most: int,
    *,
    server: str = "",
    timeout: float = TIMEOUT,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    most_seconds: float | None = None,
) -> bytes:
    """Return the answer of a server, of at most `most` bytes, to a GET request, or with a `body` to a POST request.

    Args:
      server: the only server that may be asked, such as http://localhost:8080; "" = any.
      timeout: seconds, for connecting and for every read.
      most_seconds: seconds for the whole answer, however slowly it arrives; None = no limit.

    Raises:
      Refused: the server refuses the request, or the address, a redirect or the size is not allowed.
      NoAnswer: the server cannot be reached, the failure is temporary, or the connection is lost.
    """
    content = bytearray()
    with contextlib.ExitStack() as opened:
        shut = opened.enter_context(_shutting(most_seconds)) if most_seconds else None
        response = opened.enter_context(_open(address, server, timeout, headers or {}, body, shut))
        for piece in _pieces(response):
            content += piece
            if len(content) > most:
                raise Refused(f"it has more than {most:,} bytes")
    return bytes(content)


# ------------------------------------------------------------------------------------------------------------ download
def download(address: str, path: Path) -> None:
    """Download the missing bytes of the file `path`, and retry after temporary failures, with pauses.

    Raises:
      Refused: the server refuses the request, or responds with a web page.
      NoAnswer: the last attempt has failed too.
    """
    for seconds in PAUSES:
        try:
            return _receive(address, path)
        except NoAnswer as lost:
            status(f"{lost}; retrying in {seconds:.0f} s")
            pause(seconds)
    return _receive(address, path)


def remove_download(path: Path) -> None:
    """Remove the file `path`, if it exists, and the file that identifies its version."""
    path.unlink(missing_ok=True)
    _version_file(path).unlink(missing_ok=True)


def _version_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.version")


def _received(path: Path) -> tuple[int, str]:
    """Return the number of bytes of the file `path`, and the version of the file on the server from which they are."""
    offset = path.stat().st_size if path.is_file() else 0
    return offset, _version_file(path).read_text() if offset and _version_file(path).is_file() else ""


def _receive(address: str, path: Path) -> None:
    """Request the missing bytes of a file once, and append them to the file `path`."""
    offset, version = _received(path)
    headers = {"Range": f"bytes={offset}-", "If-Range": version} if version else {}
    try:
        response = _open(address, "", TIMEOUT, headers)
    except NoAnswer as error:
        if getattr(error.__cause__, "code", 0) == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # it is shorter
            remove_download(path)
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            offset = 0
            _start(path, response)
        elif not _continues(response, offset) or _version(response) not in ("", version):  # they may ignore If-Range
            remove_download(path)
            raise NoAnswer("the file has changed")
        total = offset + response.length if response.length else 0
        status(f"downloading {address} from {megabytes(offset)} of {megabytes(total)}")
        bar = DownloadBar(total=total or None, initial=offset, desc=path.stem, unit="B", unit_scale=True)
        with open_to_append(path) as file, bar:
            for piece in _pieces(response):
                file.write(piece)
                bar.update(len(piece))


def _start(path: Path, response: http.client.HTTPResponse) -> None:
    """Prepare a download from the first byte: remove `path`, and store the version of the file on the server.

    Raises Refused if the response is a web page.
    """
    if response.headers.get_content_type() == "text/html":
        raise Refused("the response is a web page and not a file")
    remove_download(path)  # first, so that old bytes never stand beside a new version
    Folder(path.parent).write_text(_version_file(path).name, _version(response))


def _continues(response: http.client.HTTPResponse, offset: int) -> bool:
    return (response.headers.get("Content-Range") or "").startswith(f"bytes {offset}-")


def _version(response: http.client.HTTPResponse) -> str:
    """Return a strong ETag, or else the modification time, for the header If-Range; "" if the response has neither."""
    tag = response.headers.get("ETag") or ""
    return tag if tag.startswith('"') else response.headers.get("Last-Modified") or ""


# ------------------------------------------------------------------------------------------------------------- request
@contextlib.contextmanager
def _shutting(seconds: float) -> Iterator[Callable[[socket.socket], None]]:
    """Yield a function that takes a socket, which is shut down if the block takes more than `seconds`: NoAnswer."""
    taken: list[socket.socket] = []
    late = threading.Event()

    def shut() -> None:
        late.set()
        for one in taken:
            with contextlib.suppress(OSError):  # it is closed already
                one.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield taken.append
    except NoAnswer:
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise NoAnswer(f"the answer takes more than {seconds:g} s")


class _Watched(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """A handler of requests that gives the socket of each connection to `take`."""

    def __init__(self, take: Callable[[socket.socket], None]):
        super().__init__()
        self._take = take

    def do_open(self, http_class, request, **further):
        def watched(*given, **named):
            connection = http_class(*given, **named)
            connect = connection.connect

            def connect_watched():
                connect()
                self._take(connection.sock)

            connection.connect = connect_watched
            return connection

        return super().do_open(watched, request, **further)


def _open(
    address: str,
    server: str,
    timeout: float,
    headers: Mapping[str, str],
    body: bytes | None = None,
    take: Callable[[socket.socket], None] | None = None,
) -> http.client.HTTPResponse:
    """Send a request, and return the response. Arguments and errors are as in `read_url`.

    `take` gets the socket of each connection.
    """
    if problem := _why_forbidden(address, server):
        raise Refused(f"'{address}' {problem}")
    request = urllib.request.Request(address, body, {"User-Agent": "mlmoe_jax", **headers})
    try:
        watched = [_Watched(take)] if take else []
        return urllib.request.build_opener(_Redirects(server), *watched).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        failure = NoAnswer if error.code in _TEMPORARY else Refused
        raise failure(f"the server responds with {error.code}{_MEANINGS.get(error.code, '')}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = reason_of(getattr(error, "reason", error))  # URLError wraps the error of the socket
        raise NoAnswer(f"{urlsplit(address).hostname} cannot be reached ({reason})") from error


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body of a response; NoAnswer if the connection is lost before its end."""
    missing = response.length or 0  # 0 if the size is not known
    try:
        while piece := response.read1(READ_BYTES):
            missing -= len(piece)
            yield piece
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"the connection was lost ({reason_of(error)})") from error
    if missing > 0:
        raise NoAnswer(f"the connection was lost, and {megabytes(missing)} are missing")


def _why_forbidden(address: str, server: str) -> str:
    """Return why an address must not be asked; "" if it may. `server` is the only server to ask, "" for any."""
    parts = urlsplit(address)
    if server:
        expected = urlsplit(server)
        allowed = (parts.scheme, parts.netloc) == (expected.scheme, expected.netloc)
        return "" if allowed else f"is not on the server {server}"
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS)
    return "" if is_safe else "is not an https address"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects to allowed addresses only. Errors tell only the host: the rest may be secret."""

    def __init__(self, server: str):
        self._server = server

    def redirect_request(self, request, file, code, message, headers, address):
        if problem := _why_forbidden(address, self._server):
            file.close()
            parts = urlsplit(address)
            raise Refused(f"it redirects to {parts.scheme}://{parts.hostname or ''}, which {problem}")
        return super().redirect_request(request, file, code, message, headers, address)
