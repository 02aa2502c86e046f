"""The ASGI middleware: it refuses requests of other sites, reads whole bodies, sets headers, and counts responses.

It is a plain ASGI application around FastAPI, because it must also handle FastAPI's response to an unexpected error.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Collection

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from mlmoe_jax.apps.serving.service import Service

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
    """An ASGI middleware for security headers, whole request bodies and metrics.

    It refuses requests that a web page of another site sends, adds HEADERS to every response, and counts the responses
    by path. Paths that the application does not have are counted together.

    Many clients read the response only after they have sent the whole body, and fail if the connection is closed
    earlier. Therefore, the rest of the body is read and dropped before the response begins. Reading stops at the time
    limit of the request or after _MOST_DROPPED bytes. Nothing is read if the client waits for permission to send the
    body (header Expect).

    `hosts` are the host names that the header Host may have; empty = all. A server on a loopback address must check the
    host name. Otherwise, a web page of another site could reach it with DNS rebinding, by a name of that site which
    resolves to this machine.
    """

    def __init__(self, app: FastAPI, service: Service, hosts: Collection[str]):
        self._app, self._metrics, self._seconds, self._hosts = app, service.metrics, service.limits.seconds, hosts
        self._paths = {route.path for route in app.routes}

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
                self._count(scope["path"], message["status"], time.perf_counter() - started)
            await send(message)

        refusal = self._refusal(scope["method"], headers)
        app = JSONResponse({"error": refusal}, 403) if refusal else self._app
        await app(scope, receive_part, send_counted)

    def _count(self, path: str, status: int, seconds: float) -> None:
        path = path if path in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.seconds.labels(path).observe(seconds)

    def _refusal(self, method: str, headers: Headers) -> str:
        if self._hosts and re.sub(r":\d+$", "", headers.get("host", "").lower()) not in self._hosts:
            return "this server answers only to a name of this machine or in serve.hosts"
        if method == "POST" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "pages of other sites cannot use this server"
        return ""
