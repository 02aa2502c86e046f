"""An object store in memory that speaks what gcsfs and TensorStore use of Google Cloud Storage's JSON interface.

Objects are written, at once or in parts that appear together, read whole or in part, listed and deleted. Anything else
is an error 501, which `refused` remembers: such a store neither appends nor renames. Unlike the real one it has no
pages in lists, no metadata beside the generation and no rights, and any bucket exists.
"""

import asyncio
import contextlib
import itertools
import re
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

STAMP = "2026-01-01T00:00:00.000Z"
OBJECTS = "/storage/v1/b/{bucket}/o"
ALL = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Store:
    """Objects by (bucket, name): their bytes and generation.

    Attributes:
      requests: the method and path of every request.
      refused: those that no store answers.
      delay: seconds before each answer.
    """

    def __init__(self):
        self.requests, self.refused, self.delay = [], [], 0.0
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self._parts: dict[str, list[bytes]] = {}
        self._numbers = itertools.count(1)

    def app(self) -> Starlette:
        routes = [
            Route("/storage/v1/b/{bucket}", self._bucket),
            Route(OBJECTS, self._list),
            Route(OBJECTS + "/{name:path}", self._read),
            Route(OBJECTS + "/{name:path}", self._delete, methods=["DELETE"]),
            Route("/download" + OBJECTS + "/{name:path}", self._read),
            Route("/upload" + OBJECTS, self._write, methods=["POST"]),
            Route("/{any:path}", self._refuse, methods=ALL),
        ]
        return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._count)])

    async def _count(self, request: Request, answer) -> Response:
        self.requests.append(f"{request.method} {request.url.path}")
        await asyncio.sleep(self.delay)
        return await answer(request)

    async def _bucket(self, request: Request) -> Response:
        return JSONResponse({"name": request.path_params["bucket"], "location": "US", "storageClass": "STANDARD"})

    async def _list(self, request: Request) -> Response:
        query, of = request.query_params, request.path_params["bucket"]
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        items, folders = [], {}
        for bucket, name in sorted(self.objects):
            if bucket != of or not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            folder, found, _ = name.removeprefix(prefix).partition(delimiter or "\0")
            if found:
                folders[prefix + folder + found] = None
            else:
                items.append(self._about(bucket, name))
        return JSONResponse({"items": items, "prefixes": list(folders)})

    async def _read(self, request: Request) -> Response:
        key = request.path_params["bucket"], request.path_params["name"]
        if key not in self.objects:
            return Response(status_code=404)
        data, generation = self.objects[key]
        if request.query_params.get("ifGenerationNotMatch") == str(generation):
            return Response(status_code=304)
        if request.query_params.get("alt") != "media":
            return JSONResponse(self._about(*key))
        about = {"x-goog-generation": str(generation), "x-goog-stored-content-length": str(len(data))}
        if not (wanted := re.match(r"bytes=(\d+)-(\d*)$", request.headers.get("Range", ""))):
            return Response(data, headers=about)
        part = data[int(wanted[1]) : int(wanted[2] or len(data)) + 1]
        about["Content-Range"] = f"bytes {wanted[1]}-{int(wanted[1]) + len(part) - 1}/{len(data)}"
        return Response(part, 206 if part else 416, about)

    async def _write(self, request: Request) -> Response:
        query, data = request.query_params, await request.body()
        if query["uploadType"] == "resumable":
            if "upload_id" not in query:
                return Response(headers={"Location": f"{request.url}&upload_id={next(self._numbers)}"})
            parts = self._parts.setdefault(query["upload_id"], [])
            parts.append(data)
            data = b"".join(parts)
            if request.headers["Content-Range"].endswith("/*"):
                return Response(status_code=308, headers={"Range": f"bytes=0-{len(data) - 1}"})
        key = request.path_params["bucket"], query["name"]
        if not self._is_generation(key, query.get("ifGenerationMatch")):
            return Response(status_code=412)
        self.objects[key] = data, next(self._numbers)
        return JSONResponse(self._about(*key))

    async def _delete(self, request: Request) -> Response:
        key = request.path_params["bucket"], request.path_params["name"]
        return Response(status_code=self._remove(key, request.query_params.get("ifGenerationMatch")))

    async def _refuse(self, request: Request) -> Response:
        self.refused.append(self.requests[-1])
        return Response("this store neither renames nor appends", 501)

    def _is_generation(self, key: tuple[str, str], wanted: str | None) -> bool:
        return wanted is None or int(wanted) == self.objects.get(key, (b"", 0))[1]

    def _remove(self, key: tuple[str, str], generation: str | None = None) -> int:
        if key not in self.objects:
            return 404
        if not self._is_generation(key, generation):
            return 412
        del self.objects[key]
        return 204

    def _about(self, bucket: str, name: str) -> dict[str, str]:
        data, generation = self.objects[bucket, name]
        about = {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(data))}
        about |= {"generation": str(generation), "metageneration": "1", "timeCreated": STAMP, "updated": STAMP}
        return about | {"storageClass": "STANDARD", "contentType": "application/octet-stream"}


@contextlib.contextmanager
def running() -> Iterator[Store]:
    """Run a store, whose `address` is that of the server."""
    store = Store()
    with socket.create_server(("localhost", 0)) as place:
        server = uvicorn.Server(uvicorn.Config(store.app(), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        store.address = f"http://localhost:{place.getsockname()[1]}"
        try:
            yield store
        finally:
            server.should_exit = True
            thread.join()


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
