"""A server of one file that closes connections and refuses requests.

Limits: it knows GET and ranges without an end, compares If-Range only with its ETag, and keeps no connection open.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK = 10_000
CONTENT = bytes(range(256)) * 200
OTHER = CONTENT[::-1]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Answer:
    """The response to one request.

    cut: close after this many bytes. stalls: send the second half only when the server stops. heeds: the headers of the
    request that count. headers: those of the response, instead of an ETag.
    """

    status: int = 200
    cut: int | None = None
    stalls: bool = False
    heeds: tuple = ("Range", "If-Range")
    headers: dict | None = None


class Site(ThreadingHTTPServer):
    """A server of `content`. script: the responses to the next GETs. requests: the headers of those so far."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.script, self.requests, self.stopped = CONTENT, [], [], threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}/model.safetensors"

    def handle_error(self, request, client_address):
        """Print nothing about clients that have disconnected."""

    @property
    def ranges(self) -> list[str | None]:
        """The Range header of every request."""
        return [headers["Range"] for headers in self.requests]


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        site, content = self.server, self.server.content
        site.requests.append(self.headers)
        answer = site.script.pop(0) if site.script else Answer()
        tag, first, status = f'"{sha256(content)[:8]}"', 0, answer.status
        asked, version = (self.headers[name] if name in answer.heeds else None for name in ("Range", "If-Range"))
        headers = {"ETag": tag} if answer.headers is None else answer.headers
        if status == 200 and asked and version in (None, tag):
            first, status = int(asked.strip("bytes=-")), 206
            headers = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}", **headers}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content) - first), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        body = content[first:][: answer.cut]
        half = len(body) // 2
        self.wfile.write(body[:half])
        if answer.stalls:
            site.stopped.wait(60)
        self.wfile.write(body[half:])


@contextlib.contextmanager
def running() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, args=(0.01,))
        thread.start()
        yield site
        site.stopped.set()
        site.shutdown()
        thread.join()
