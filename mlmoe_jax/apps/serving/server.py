"""The ASGI application (routes, headers, answers to failed requests), and the server that runs it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette import exceptions
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlmoe_jax.apps.serving import kserve, label_studio
from mlmoe_jax.apps.serving.labeler import Labeler
from mlmoe_jax.apps.serving.service import BODY, READY, SECONDS, Metrics, Options, Service
from mlmoe_jax.errors import DONE, OUTDATED, UserError
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import BEST
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import printable
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
_MOST_DROPPED = 64 << 20  # bytes of an unread body
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # as in the header Host


def make_app(service: Service, *, hosts: Sequence[str] = ()) -> ASGIApp:
    """Return the application of a service, which compiles the model when it starts.

    `hosts` are the names under which the server may be addressed; () = all. A server for one machine must check the
    name, because a page of another site can reach it under a name of the site that resolves to this machine.
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

    @app.post("/predict", openapi_extra={"requestBody": BODY})
    async def predict(request: Request, options: Annotated[Options, Query()]) -> Response:
        """Label one image, the body, or several images, the files of a form.

        If one of several images cannot be read, its result has an error, and the remaining images are labeled.
        """
        return JSONResponse({"results": await service.results(request, options)})

    @app.get("/health", responses={503: {"description": "It is starting or stopping."}})
    async def health(response: Response) -> dict[str, str]:
        """Return the status 200 if the server is ready."""
        response.status_code = 200 if service.state == READY else 503
        return {"status": service.state}

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """Return labels, thresholds and limits."""
        return service.describe()

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return counters in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    label_studio.add_routes(app, service)
    kserve.add_routes(app, service)
    for path, (name, kind) in _ASSETS.items():
        asset = Response((files(__package__) / name).read_bytes(), media_type=kind)
        app.add_route(path, partial(_fixed, asset), include_in_schema=False)
    return _Guard(app, service.metrics, {route.path for route in app.routes}, frozenset(hosts), service.seconds)


async def _fixed(answer: Response, request: Request) -> Response:
    return answer


async def _refusal(request: Request, error: Exception) -> Response:
    """Return the answer to a failed request, with one sentence and nothing about the server."""
    status, headers, reason = 500, None, "the server failed; its log has the reason"
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, reason = 422, f"the option {first['loc'][-1]} is wrong: {first['msg']}"
    elif isinstance(error, exceptions.HTTPException):
        status, headers, reason = error.status_code, error.headers, error.detail
    elif isinstance(error, ClientDisconnect):
        status, reason = 400, "the request was cut short"  # only counted, the client is gone
    return JSONResponse({"error": printable(reason)}, status, headers)  # a request may hold half a character


_FAILURES = dict.fromkeys((RequestValidationError, exceptions.HTTPException, ClientDisconnect, Exception), _refusal)


class _Guard:
    """Refuses requests from other sites, adds the headers to every answer, and counts the answers.

    Many clients read the answer only after they have sent the whole body, and fail if the connection closes before. So
    the rest of a body is read and dropped before the answer, until `seconds` after the start of the request at most,
    unless the client waits for permission to send it, or it is too large.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str], hosts: frozenset[str], seconds: float):
        self._app, self._metrics, self._paths, self._hosts, self._seconds = app, metrics, paths, hosts, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, path = time.perf_counter(), scope["path"] if scope["path"] in self._paths else "other"
        headers, whole = Headers(scope=scope), False

        async def receive_part() -> Message:
            nonlocal whole
            message = await receive()
            whole = not message.get("more_body", False)
            return message

        async def drop_rest() -> None:
            size, remaining = 0, self._seconds - (time.perf_counter() - started)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    while not whole and size <= _MOST_DROPPED:
                        size += len((await receive_part()).get("body", b""))

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if "expect" not in headers:
                    await drop_rest()
                MutableHeaders(scope=message).update(HEADERS)
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


# ---------------------------------------------------------------------------------------------------------- the server
def serve(
    folder: RunFolder,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    checkpoint: str = BEST,
) -> Outcome:
    """Serve the model of a run folder until SIGTERM or Ctrl-C, and then answer the requests in progress.

    Its exit code is 0 after SIGTERM, 3 if the newest checkpoint is damaged and an older checkpoint was used.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
      UserError: the address cannot be used, the folder holds no trained model, or the model cannot be compiled.
    """
    folder.require_model()
    with _listening(host, port) as listener:
        predictor = Predictor.from_run(folder.path, overrides, checkpoint=checkpoint)
        failures: list[Exception] = []

        def failed(error: Exception) -> None:
            failures.append(error)
            server.should_exit = True

        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        service = Service(Labeler(predictor), ready=lambda: status(f"ready: {address}"), failed=failed)
        quiet = {"log_level": "warning", "access_log": False, "server_header": False, "proxy_headers": False}
        app, patience = make_app(service, hosts=own_names(host)), int(SECONDS) + 5
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="on", ws="none", timeout_graceful_shutdown=patience, **quiet)
        )
        status(f"compiling; {address}/health tells when it is done, {address}/openapi.json describes the API")
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients get errors about damaged forms
        # Uvicorn raises the signal again after the last answer.
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)
    if failures:
        raise failures[0]
    status("stopped; all requests are answered")
    return Outcome(exit_code=OUTDATED if predictor.run.outdated else DONE)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens before the model is loaded, so that a wrong address is reported at once.

    Another process could take the address of a socket that is only bound, which uvloop would not report.
    """
    if not host:  # for a socket, "" means every address of the machine
        raise UserError("--host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all of this machine")
    elsewhere = "give another --host or --port"
    if not 0 <= port < 2**16:
        raise UserError(f"cannot listen on {host}:{port}: ports are from 0 to 65535; {elsewhere}")
    try:
        ipv6 = ":" in host  # "::" accepts IPv4 too
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=ipv6)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; {elsewhere}") from error


def own_names(host: str) -> tuple[str, ...]:
    """Return the names under which a server at `host` may be addressed; () = all, if other machines can reach it."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return (*LOOPBACK, f"[{host}]" if ":" in host else host) if local else ()
