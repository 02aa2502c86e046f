"""Layers around the application: refusal of other sites, reading of whole bodies, headers and counters of answers.

They are plain ASGI applications outside FastAPI, because FastAPI's own answer to an unexpected error also needs them.
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


class RefuseOtherSites:
    """Answers 403 to requests of pages of other sites.

    Args:
      app: the application.
      hosts: the names under which the server may be addressed; empty = all. A server for one machine must check the
        name, because a page of another site can reach it under a name of the site that resolves to this machine.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and (refusal := self._refusal(scope["method"], Headers(scope=scope))):
            app = JSONResponse({"error": refusal}, 403)
        await app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> str:
        if self._hosts and re.sub(r":\d+$", "", headers.get("host", "")) not in self._hosts:
            return "this server answers only under the name of this machine"
        if method == "POST" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "pages of other sites cannot use this server"
        return ""


class ReadWholeBody:
    """Reads the rest of the body before the answer begins.

    Many clients read the answer only after they have sent the whole body, and fail if the connection closes before. The
    rest is dropped, until `seconds` after the start of the request at most, unless the client waits for permission to
    send it, or it is too large.
    """

    def __init__(self, app: ASGIApp, seconds: float):
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "expect" in Headers(scope=scope):
            await self._app(scope, receive, send)
            return
        late, complete = asyncio.get_running_loop().time() + self._seconds, False

        async def receive_part() -> Message:
            nonlocal complete
            message = await receive()
            complete = not message.get("more_body", False)
            return message

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                size = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(late):
                        while not complete and size <= _MOST_DROPPED:
                            size += len((await receive_part()).get("body", b""))
            await send(message)

        await self._app(scope, receive_part, send_after_body)


class CountAnswers:
    """Adds HEADERS to every answer, and counts the answers by path; all paths not in `paths` count as one."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Collection[str]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
                self._metrics.requests.labels(path, str(message["status"])).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, send_counted)
