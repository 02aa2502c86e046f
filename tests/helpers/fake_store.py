"""An object store in memory that speaks enough of Google Cloud Storage's JSON interface for gcsfs and TensorStore.

It has what an object store has: whole objects are written, read in part, listed and deleted. It has no append and no
rename: asking for either is an error 501, and is remembered in `refused`. It counts requests, and can delay them and
answer 429, as a store does to which one object is written too often.
"""

import contextlib
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

STAMP = "2026-01-01T00:00:00.000Z"
OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o(?:/(.*))?$")
UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o$")


class Store:
    """Objects by (bucket, name): their bytes and generation.

    Attributes:
      requests: the method and path of every request.
      delay: seconds before each answer.
      busy: the number of uploads to answer with 429 from now on.
    """

    def __init__(self):
        self.requests, self.delay, self.busy = [], 0.0, 0
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.open_uploads: dict[str, tuple[str, str, bytearray]] = {}
        self.refused: list[str] = []
        self.lock, self._numbers = threading.Lock(), itertools.count(1)

    def next_number(self) -> int:
        return next(self._numbers)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    store: Store

    # ------------------------------------------------------------------------------------------------- requests
    def do_GET(self):
        path, query = self._asked()
        if not (found := OBJECT.match(path)):
            return self._json(200, {"name": path.rpartition("/")[2], "location": "US", "storageClass": "STANDARD"})
        bucket, name = found[1], unquote(found[2] or "")
        if not name:
            return self._list(bucket, query)
        with self.store.lock:
            entry = self.store.objects.get((bucket, name))
        if entry is None:
            return self._json(404, {"error": {"code": 404, "message": "no such object"}})
        data, generation = entry
        if query.get("ifGenerationNotMatch") == str(generation):
            return self._send(304, b"")
        if query.get("alt") != "media":
            return self._json(200, _about(bucket, name, data, generation))
        return self._media(data, generation)

    def do_POST(self):
        path, query = self._asked()
        body = self._body()
        if path.startswith("/batch/"):
            return self._batch(body)
        if not (found := UPLOAD.match(path)):
            return self._refuse(path)
        if self.store.busy:
            self.store.busy -= 1
            return self._json(429, {"error": {"code": 429, "message": "too many writes to this object"}})
        if "upload_id" in query:
            return self._continue(query["upload_id"], body)
        kind, bucket = query.get("uploadType"), found[1]
        if kind == "resumable":
            key = str(self.store.next_number())
            name = query.get("name") or json.loads(body)["name"]
            self.store.open_uploads[key] = (bucket, name, bytearray())
            place = f"http://{self.headers['Host']}{path}?uploadType=resumable&upload_id={key}"
            return self._send(200, b"", Location=place)
        if kind == "multipart":
            about, body = self._parts(body)
            name = json.loads(about)["name"]
        else:
            name = query["name"]
        return self._write(bucket, name, body, query.get("ifGenerationMatch"))

    def do_PUT(self):
        path, query = self._asked()
        body = self._body()
        return self._continue(query["upload_id"], body) if "upload_id" in query else self._refuse(path)

    def do_DELETE(self):
        path, query = self._asked()
        bucket, name = OBJECT.match(path).groups()
        self._send(self._delete(bucket, unquote(name), query.get("ifGenerationMatch")), b"")

    def do_PATCH(self):
        self._refuse(self._asked()[0])

    # -------------------------------------------------------------------------------------------------- answers
    def _list(self, bucket: str, query: dict[str, str]):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        with self.store.lock:
            names = sorted(name for of, name in self.store.objects if of == bucket and name.startswith(prefix))
            objects = {name: self.store.objects[bucket, name] for name in names}
        items, folders = [], []
        for name in names:
            if name < query.get("startOffset", "") or ("endOffset" in query and name >= query["endOffset"]):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.append(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(_about(bucket, name, *objects[name]))
        return self._json(200, {"items": items, "prefixes": sorted(set(folders))})

    def _media(self, data: bytes, generation: int):
        about = {"x-goog-generation": str(generation), "x-goog-stored-content-length": str(len(data))}
        if not (wanted := re.match(r"bytes=(\d*)-(\d*)$", self.headers.get("Range", ""))):
            return self._send(200, data, **about)
        if not wanted[1]:  # the given number of last bytes
            first, last = max(0, len(data) - int(wanted[2])), len(data) - 1
        else:
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first > last:
            return self._send(416, b"", **about)
        about["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._send(206, data[first : last + 1], **about)

    def _continue(self, key: str, body: bytes):
        """Receive a part of an object; the object does not exist before the last part."""
        bucket, name, sofar = self.store.open_uploads[key]
        sofar += body
        if self.headers.get("Content-Range", "").endswith("/*"):
            return self._send(308, b"", Range=f"bytes=0-{len(sofar) - 1}")
        del self.store.open_uploads[key]
        return self._write(bucket, name, bytes(sofar), None)

    def _write(self, bucket: str, name: str, data: bytes, generation: str | None):
        with self.store.lock:
            there = self.store.objects.get((bucket, name), (b"", 0))[1]
            if generation is not None and int(generation) != there:
                return self._json(412, {"error": {"code": 412, "message": "another generation"}})
            number = self.store.next_number()
            self.store.objects[bucket, name] = data, number
        return self._json(200, _about(bucket, name, data, number))

    def _delete(self, bucket: str, name: str, generation: str | None) -> int:
        with self.store.lock:
            entry = self.store.objects.get((bucket, name))
            if entry is None:
                return 404
            if generation is not None and int(generation) != entry[1]:
                return 412
            del self.store.objects[bucket, name]
            return 204

    def _batch(self, body: bytes):
        statuses = []
        for part in self._parts(body):
            method, path = part.split(b"\r\n", 1)[0].split(b" ")[:2]
            found = OBJECT.match(urlsplit(path.decode()).path)
            if method != b"DELETE" or not found:
                return self._refuse(path.decode())
            statuses.append(self._delete(found[1], unquote(found[2]), None))
        answer = "".join(
            f"--batch\r\nContent-Type: application/http\r\nContent-ID: <response-{number}>\r\n\r\n"
            f"HTTP/1.1 {status} {'No Content' if status == 204 else 'Not Found'}\r\nContent-Length: 0\r\n\r\n\r\n"
            for number, status in enumerate(statuses, 1)
        )
        headers = {"Content-Type": "multipart/mixed; boundary=batch"}
        return self._send(200, (answer + "--batch--").encode(), **headers)

    def _refuse(self, path: str):
        self.store.refused.append(f"{self.command} {path}")
        print(f"refused: {self.command} {path}", flush=True)
        return self._json(501, {"error": {"code": 501, "message": "this store neither renames nor appends"}})

    # -------------------------------------------------------------------------------------------------- plumbing
    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        self.store.requests.append(f"{self.command} {parts.path}")
        time.sleep(self.store.delay)
        return parts.path.rstrip("/"), {key: values[0] for key, values in parse_qs(parts.query).items()}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _parts(self, body: bytes) -> list[bytes]:
        """Split a multipart body; binary content survives, as it does not in the email package."""
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
        between = body.split(b"--" + boundary)[1:-1]
        newline = b"\r\n" if between[0].startswith(b"\r\n") else b"\n"
        parts = (part.removeprefix(newline).removesuffix(newline) for part in between)
        return [part.split(2 * newline, 1)[1] for part in parts]

    def _json(self, status: int, value: dict):
        self._send(status, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, **headers: str):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def _about(bucket: str, name: str, data: bytes, generation: int) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(data)),
        "generation": str(generation),
        "metageneration": "1",
        "timeCreated": STAMP,
        "updated": STAMP,
        "storageClass": "STANDARD",
        "contentType": "application/octet-stream",
    }


class Server(ThreadingHTTPServer):
    """Answers each request in a separate thread."""

    def handle_error(self, request, client_address):
        # A client that ended has no use for its answers.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve() -> tuple[Server, Store]:
    """Return a server at a free port of this machine, not yet running, and its content."""
    store = Store()
    server = Server(("localhost", 0), type("OfStore", (Handler,), {"store": store}))
    return server, store


@contextlib.contextmanager
def running() -> Iterator[Store]:
    """Run a store, whose `address` is that of the server."""
    server, store = serve()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.address = f"http://localhost:{server.server_address[1]}"
    yield store
    server.shutdown()
    server.server_close()


def environment(store: Store) -> dict[str, str]:
    """Return the variables that connect Google's libraries with a store."""
    return {
        "STORAGE_EMULATOR_HOST": store.address,  # gcsfs
        "TENSORSTORE_GCS_HTTP_URL": store.address,
        "FSSPEC_GCS_TOKEN": "anon",
        "FSSPEC_GS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_GCE_CHECK": "true",
    }
