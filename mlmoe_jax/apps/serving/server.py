"""The ASGI application (routes, headers, error responses), and the server that runs it until a signal stops it."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette import exceptions
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from mlmoe_jax.apps.serving.connections import LimitedServer
from mlmoe_jax.apps.serving.label_studio_backend import add_label_studio_routes
from mlmoe_jax.apps.serving.labeler import Labeler
from mlmoe_jax.apps.serving.middleware import Guard
from mlmoe_jax.apps.serving.request_images import BODY, read_request_images
from mlmoe_jax.apps.serving.service import READY, RequestOptions, Service, require_result
from mlmoe_jax.errors import UserError, reason_of, success
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import printable, quantity
from mlmoe_jax.runtime.version import __version__

_ASSETS = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
_logger = logging.getLogger(__name__)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # as in the header Host


def make_app(service: Service, *, hosts: Sequence[str] = ()) -> ASGIApp:
    """Return the ASGI application, which compiles the model when it starts; `hosts` as in `Guard`, () = all."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        yield
        service.stop()
        await running
        service.close()

    app = FastAPI(
        title="mlmoe_jax",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=_FAILURES,
    )
    add_image_routes(app, service)
    add_label_studio_routes(app, service)
    for path, (name, kind) in _ASSETS.items():
        asset = Response((files(__package__) / name).read_bytes(), media_type=kind)
        app.add_route(path, asset, methods=["GET"], include_in_schema=False)
    return Guard(app, service, hosts)


def add_image_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of this package's own API to an application: /predict, /health, /model and /metrics."""

    @app.post("/predict", openapi_extra={"requestBody": BODY})
    async def predict(request: Request, options: Annotated[RequestOptions, Query()]) -> Response:
        """Label the image in the body, or the images in a multipart form.

        If an image of a form cannot be read, its result has an error, and all other images are labeled.
        """
        service.check(options)
        async with service.admit() as arrived:
            images = await read_request_images(request, service.limits)
            arrived(len(images))
            results = await service.results(images, options)
        require_result(results)
        return JSONResponse({"results": results})

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"description": "It is starting or stopping."}})
    async def health(response: Response) -> dict[str, str]:
        """Return the HTTP status 200 if the server is ready, and 503 otherwise."""
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


async def _refusal(request: Request, error: Exception) -> Response:
    """Return the JSON response to a failed request: one sentence, without internal details of the server."""
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
def serve(open_predictor: Callable[[], Predictor], *, host: str, port: int) -> Outcome:
    """Serve a model until SIGTERM or Ctrl-C. Then finish the requests in progress, and return.

    Requests that are not answered within `connections.ANSWER_SECONDS` are refused. If the server still runs after
    `connections.STOP_SECONDS`, as when it compiles, the process ends. The exit code is 0 after SIGTERM, or 3 if the
    newest checkpoint is damaged and an older checkpoint was used.

    Args:
      open_predictor: function that opens the predictor. It is called after the address is taken.
      port: the port to listen on; 0 = any free port.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
      UserError: the address cannot be used, or the model cannot be opened or compiled.
    """
    with _listening(host, port) as listener:
        predictor = open_predictor()
        failures: list[Exception] = []

        def compiled(error: Exception | None) -> None:
            if error is None:
                status(f"ready: {address}")
            else:
                failures.append(error)
                server.should_exit = True

        code = success(predictor.run.outdated)
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        service = Service(Labeler(predictor), compiled=compiled)
        hosts = own_names(host, predictor.run.config.serve.hosts)
        server = LimitedServer(make_app(service, hosts=hosts), service, code)
        status(f"compiling; {address}/health tells when it is done, {address}/openapi.json describes the API")
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients get errors about damaged forms
        # Uvicorn raises the signal again after the last answer.
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)
            server.deadline.cancel()  # after everything that may hang
    if failures:
        raise failures[0]
    unanswered = quantity(server.dropped, "request")
    status(f"stopped; {f'{unanswered} did not arrive in time' if server.dropped else 'all requests are answered'}")
    return Outcome(exit_code=code)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Raise UserError if the address cannot be used.

    The server opens the socket before it loads the model, so that a wrong address is reported at once. Binding the
    socket without listening would not suffice: another process could take the address, and uvloop would not report it.
    """
    if not host:  # for a socket, "" means every address of the machine
        raise UserError("--host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all of this machine")
    if not 0 <= port <= 65535:
        raise UserError(f"cannot listen on {host}:{port}: port must be 0-65535; give another --host or --port")
    try:
        ipv6 = ":" in host  # "::" accepts IPv4 too
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=ipv6)
    except OSError as error:
        reason = f"{reason_of(error)}; give another --host or --port"
        raise UserError(f"cannot listen on {host}:{port}: {reason}") from error


def own_names(host: str, proxies: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the host names that requests to a server at the address `host` may use in the header Host.

    If `host` is not a loopback address, other machines can reach the server, and the result is (), which means all.
    `proxies` are the names of proxies on this machine.
    """
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        if proxies:
            _logger.warning(f"serve.hosts has no effect, because a server at {host} answers to every name")
        return ()
    return (*LOOPBACK, f"[{host}]" if ":" in host else host, *map(str.lower, proxies))
