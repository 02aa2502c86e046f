"""The ASGI application: routes, headers, and the answers to requests that fail."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files

from jinja2 import Environment
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlmoe_jax.apps.serving import openapi
from mlmoe_jax.apps.serving.metrics import Metrics
from mlmoe_jax.apps.serving.requests import Refused
from mlmoe_jax.apps.serving.service import READY, Service

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
_OTHER = "other"  # the path of unknown routes in metrics


def make_app(service: Service, *, hosts: Sequence[str] = ()) -> ASGIApp:
    """Return the application of a service, which compiles the model when it starts.

    hosts: host names under which the server may be addressed; () = all. A server for this machine only has to check
    them: otherwise, a page of another site can reach it under a name of its own that resolves to this machine.
    """
    document = openapi.document(service.limits, len(service.labeler.predictor.names))
    limits = {name: service.limits[name] for name in ("images", "megabytes", "megapixels", "seconds")}
    model = service.labeler.describe() | {"limits": limits}
    here = files(__package__)
    docs = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (here / "docs.html").read_text()
    )

    async def predict(request: Request) -> Response:
        return JSONResponse({"results": await service.results(request)})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": service.state}, 200 if service.state == READY else 503)

    def fixed(path: str, response: Response) -> Route:
        async def answer(request: Request) -> Response:
            return response

        return Route(path, answer, methods=["GET"])

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        fixed("/model", JSONResponse(model)),
        fixed("/openapi.json", JSONResponse(document)),
        fixed("/docs", Response(docs.render(api=document), media_type="text/html")),
        *(fixed(path, Response((here / name).read_bytes(), media_type=kind)) for path, (name, kind) in _ASSETS.items()),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        yield
        service.stop()
        await running
        service.close()

    refusals = {Refused: _refused, HTTPException: _http_error, ClientDisconnect: _gone, Exception: _failure}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=refusals)
    return _Guard(app, service.metrics, {route.path for route in routes}, frozenset(hosts))


async def _refused(request: Request, error: Refused) -> Response:
    return JSONResponse({"error": error.reason}, error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    reason = {404: "there is nothing at this address", 405: "this address takes another method"}
    return JSONResponse({"error": reason.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return JSONResponse({"error": "the request was cut short"}, 400)  # nobody receives it, but it is counted


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed; its log has the reason"}, 500)


class _Guard:
    """Refuses requests from other sites, adds the headers to every answer, and counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str], hosts: frozenset[str]):
        self._app, self._metrics, self._paths, self._hosts = app, metrics, paths, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, path = time.perf_counter(), scope["path"] if scope["path"] in self._paths else _OTHER

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                self._metrics.request(path, message["status"], time.perf_counter() - started)
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
