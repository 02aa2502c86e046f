"""The ASGI application (routes, headers, answers to failed requests), and the server that runs it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette import exceptions
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from mlmoe_jax.apps.serving.kserve import InferenceProtocol
from mlmoe_jax.apps.serving.label_studio_backend import LabelStudioBackend
from mlmoe_jax.apps.serving.labeler import Labeler
from mlmoe_jax.apps.serving.middleware import CountAnswers, ReadWholeBody, RefuseOtherSites
from mlmoe_jax.apps.serving.request_images import BODY
from mlmoe_jax.apps.serving.service import READY, REQUEST_SECONDS, Options, Service, require_readable
from mlmoe_jax.errors import DONE, OUTDATED, UserError
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import BEST
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import printable
from mlmoe_jax.runtime.version import __version__

_ASSETS = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript")}
_ASSETS |= {"/style.css": ("style.css", "text/css")}
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # as in the header Host


def make_app(service: Service, *, hosts: Sequence[str] = ()) -> ASGIApp:
    """Return the application of a service, which compiles the model when it starts.

    `hosts` are the names under which the server may be addressed, as in `RefuseOtherSites`.
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
    for api in (ImageApi(service), LabelStudioBackend(service), InferenceProtocol(service)):
        api.add_to(app)
    for path, (name, kind) in _ASSETS.items():
        asset = Response((files(__package__) / name).read_bytes(), media_type=kind)
        app.add_route(path, partial(_fixed, asset), include_in_schema=False)
    guarded = ReadWholeBody(RefuseOtherSites(app, frozenset(hosts)), service.seconds)
    return CountAnswers(guarded, service.metrics, {route.path for route in app.routes})


class ImageApi:
    """The server's own routes: labels of images, and the state of the server."""

    def __init__(self, service: Service):
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        app.add_api_route("/predict", self.predict, methods=["POST"], openapi_extra={"requestBody": BODY})
        app.add_api_route("/health", self.health, responses={503: {"description": "It is starting or stopping."}})
        app.add_api_route("/model", self.model)
        app.add_api_route("/metrics", self.metrics, response_class=Response)

    async def predict(self, request: Request, options: Annotated[Options, Query()]) -> Response:
        """Label one image, the body, or several images, the files of a form.

        If one of several images cannot be read, its result has an error, and the remaining images are labeled.
        """
        results = await self._service.results(request, options)
        require_readable(results)
        return JSONResponse({"results": results})

    async def health(self, response: Response) -> dict[str, str]:
        """Return the status 200 if the server is ready."""
        response.status_code = 200 if self._service.state == READY else 503
        return {"status": self._service.state}

    async def model(self) -> dict[str, Any]:
        """Return labels, thresholds and limits."""
        return self._service.describe()

    async def metrics(self) -> Response:
        """Return counters in the text format of Prometheus."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
        app, patience = make_app(service, hosts=own_names(host)), int(REQUEST_SECONDS) + 5
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
