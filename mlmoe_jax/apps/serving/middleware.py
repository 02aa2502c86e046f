"""The layer around the application: refusal of other sites, reading of whole bodies, headers and counters of answers.

It is a plain ASGI application outside FastAPI, because FastAPI's own answer to an unexpected error also needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Collection

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlmoe_jax.apps.serving.service import ServerMetrics

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
_MOST_DROPPED = 64 << 20  # bytes of an unread body


class Guard:
    """Refuses requests of pages of other sites, reads whole bodies, and adds HEADERS to every answer and counts it.

    Many clients read the answer only after they have sent the whole body, and fail if the connection closes before. So
    the rest of the body is dropped before the answer begins, until `seconds` after the start of the request at most,
    unless the client waits for permission to send it, or it is too large.

    Args:
      app: the application.
      metrics: counts the answers by path.
      seconds: time limit of a request.
      hosts: the names under which the server may be addressed; empty = all. A server for one machine must check the
        name, because a page of another site can reach it under a name of the site that resolves to this machine.
      paths: the paths of the application; all others count as one.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, seconds: float, hosts: Collection[str], paths: Collection[str]
    ):
        self._app, self._metrics, self._seconds = app, metrics, seconds
        self._hosts, self._paths = hosts, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        started, late = time.perf_counter(), asyncio.get_running_loop().time() + self._seconds
        complete = "expect" in headers

        async def receive_part() -> Message:
            nonlocal complete
            message = await receive()
            complete = complete or not message.get("more_body", False)
            return message

        async def drop_rest() -> None:
            size = 0
            async with asyncio.timeout_at(late):
                while not complete and size <= _MOST_DROPPED:
                    size += len((await receive_part()).get("body", b""))

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                with contextlib.suppress(TimeoutError):
                    await drop_rest()
                MutableHeaders(scope=message).update(HEADERS)
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - started)
            await send(message)

        refusal = self._refusal(scope["method"], headers)
        app = JSONResponse({"error": refusal}, 403) if refusal else self._app
        await app(scope, receive_part, send_counted)

    def _refusal(self, method: str, headers: Headers) -> str:
        if self._hosts and re.sub(r":\d+$", "", headers.get("host", "")) not in self._hosts:
            return "this server answers only under the name of this machine"
        if method == "POST" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "pages of other sites cannot use this server"
        return ""
