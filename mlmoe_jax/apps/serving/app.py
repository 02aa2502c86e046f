"""The ASGI application: routes, headers, and the answers to requests that fail."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib.resources import files
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette import exceptions
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlmoe_jax.apps.serving import requests
from mlmoe_jax.apps.serving.requests import Options
from mlmoe_jax.apps.serving.service import READY, Metrics, Service
from mlmoe_jax.runtime.version import __version__

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
_ASSETS = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript")}
_ASSETS |= {"/style.css": ("style.css", "text/css")}


def make_app(service: Service, *, hosts: Sequence[str] = ()) -> ASGIApp:
    """Return the application of a service, which compiles the model when it starts.

    Args:
      service: the model, its queue and its limits.
      hosts: host names under which the server may be addressed; () = all. A server for this machine only has to check
        them: otherwise, a page of another site can reach it under a name of its own that resolves to this machine.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        yield
        service.stop()
        await running
        service.close()

    about = {"title": "mlmoe_jax", "version": __version__, "docs_url": None, "redoc_url": None}
    app = FastAPI(**about, lifespan=lifespan, exception_handlers=_FAILURES)
    refusals = {"4XX": {"model": requests.Error}, "5XX": {"model": requests.Error}}
    body = {"requestBody": requests.BODY}

    @app.post("/predict", response_model=requests.Results, responses=refusals, openapi_extra=body)
    async def predict(request: Request, options: Annotated[Options, Query()]) -> Response:
        """Label one image, the body, or several, the files of a form.

        If one of several images cannot be read, its result has an error, and the others are labeled.
        """
        return JSONResponse({"results": await service.results(request, options)})

    @app.get("/health", responses={503: {"description": "It is starting or stopping."}})
    async def health(response: Response) -> dict[str, str]:
        """Return the status 200 if the server is ready."""
        response.status_code = 200 if service.state == READY else 503
        return {"status": service.state}

    @app.get("/model")
    async def model() -> requests.Model:
        """Return labels, thresholds and limits."""
        return requests.Model(**service.describe())

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return counters in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, (name, kind) in _ASSETS.items():
        asset = Response((files(__package__) / name).read_bytes(), media_type=kind)
        app.add_route(path, partial(_fixed, asset), include_in_schema=False)
    return _Guard(app, service.metrics, {route.path for route in app.routes}, frozenset(hosts))


async def _fixed(answer: Response, request: Request) -> Response:
    return answer


async def _refusal(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed, with one sentence and nothing about the server."""
    status, headers, reason = 500, None, "the server failed; its log has the reason"
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, reason = 422, f"the option {first['loc'][-1]} is wrong: {first['msg']}"
    elif isinstance(error, exceptions.HTTPException):
        status, headers, reason = error.status_code, error.headers, error.detail
    elif isinstance(error, ClientDisconnect):
        status, reason = 400, "the request was cut short"  # nobody receives it, but it is counted
    return JSONResponse({"error": reason}, status, headers)


_FAILURES = dict.fromkeys((RequestValidationError, exceptions.HTTPException, ClientDisconnect, Exception), _refusal)


class _Guard:
    """Refuses requests from other sites, adds the headers to every answer, and counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str], hosts: frozenset[str]):
        self._app, self._metrics, self._paths, self._hosts = app, metrics, paths, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, path = time.perf_counter(), scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
                self._metrics.requests.labels(path, str(message["status"])).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - started)
            await send(message)

        refusal = self._refusal(scope["method"], Headers(scope=scope))
        app = JSONResponse({"error": refusal}, 403) if refusal else self._app
        await app(scope, receive, counted)

    def _refusal(self, method: str, headers: Headers) -> str:
        if self._hosts and re.sub(r":\d+$", "", headers.get("host", "")) not in self._hosts:
            return "this server answers only under the name of this machine"
        if method == "POST" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "pages of other sites cannot use this server"
        return ""
