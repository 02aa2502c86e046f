"""A local server of one file that closes connections and refuses requests."""

import hashlib
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlmoe_jax.pretrained.download import Unreachable, fetch

CHUNK = 10_000
CONTENT = bytes(range(256)) * 200
OTHER = CONTENT[::-1]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Answer:
    """The response to one request. cut: close after this many bytes. wait: event to await before the last half."""

    status: int = 200
    cut: int | None = None
    ranges: bool = True
    heed_if_range: bool = True
    validators: bool = True
    headers: tuple = ()
    wait: threading.Event | None = None


class Site(ThreadingHTTPServer):
    """A server of one file; `script` holds the responses to the next GETs, after which come default ones."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.script, self.requests = CONTENT, [], []

    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/model.safetensors"

    def handle_error(self, request, client_address):
        """Print nothing about clients that have disconnected."""

    @property
    def ranges(self) -> list[str | None]:
        """The Range header of every request."""
        return [headers["Range"] for headers in self.requests]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        site, content = self.server, self.server.content
        site.requests.append(self.headers)
        answer = site.script.pop(0) if site.script else Answer()
        tag, first, status = f'"{sha256(content)[:8]}"', 0, answer.status
        known = (None, tag) if answer.heed_if_range else (None, tag, self.headers["If-Range"])
        if status == 200 and answer.ranges and self.headers["Range"] and self.headers["If-Range"] in known:
            first, status = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")), 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        if answer.validators:
            self.send_header("ETag", tag)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        body = content[first:][: answer.cut]
        half = len(body) // 2
        self.wfile.write(body[:half])
        if answer.wait:
            answer.wait.wait(5)
        self.wfile.write(body[half:])


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.name != ".lock")


def assert_complete(target: Path, content: bytes = CONTENT):
    assert target.read_bytes() == content
    assert names(target) == [target.name, f"{target.name}.sha256"]
    assert Path(f"{target}.sha256").read_text() == f"{sha256(content)}  {target.name}\n"


def leave_part(site: Site, target: Path, cut: int = 30_000):
    """Make a download fail permanently after `cut` bytes."""
    script, site.script = site.script, [Answer(cut=cut), *[Answer(503)] * 9]
    with pytest.raises(Unreachable):
        fetch(site.address(), target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.version"]
    assert Path(f"{target}.part").read_bytes() == site.content[:cut]
    site.script = script
    site.requests.clear()


def assert_helps(text: str, address: str, target: Path):
    """Assert that the message has the file, the folder, the address and the remedy."""
    start = f"{target.name} is not in {target.parent} and cannot be downloaded from {address}, because "
    assert text.startswith(start)
    assert text.endswith(f"; put a copy of the file at {target}")
