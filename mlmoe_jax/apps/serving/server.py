"""Run the server of --mode=serve until a signal stops it."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
from collections.abc import Sequence

import uvicorn

from mlmoe_jax.apps.serving.app import make_app
from mlmoe_jax.apps.serving.labeler import Labeler
from mlmoe_jax.apps.serving.service import SECONDS, Service
from mlmoe_jax.errors import DONE, OUTDATED, UserError
from mlmoe_jax.inference.predict import Predictor
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import BEST
from mlmoe_jax.runtime.progress import status

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # as in the header Host


def serve(
    folder: RunFolder,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    checkpoint: str = BEST,
) -> int:
    """Serve the model of a run folder until SIGTERM or Ctrl-C, after which the requests in progress are answered.

    Args:
      folder, overrides, checkpoint: as in `Predictor.from_run`.
      host, port: the address to listen on; port 0 takes a free one.

    Returns:
      The exit code: 0 after SIGTERM, 3 if the newest checkpoint is damaged and the one before it was used.

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
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients are told of forms that cannot be read
        # Uvicorn raises the signal again at the end, when everything is answered.
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)
    if failures:
        raise failures[0]
    status("stopped; all requests are answered")
    return OUTDATED if predictor.run.outdated else DONE


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens before the model is loaded, so that a wrong address is known at once.

    If it were only bound, another process could still take the address, which uvloop would not report.
    """
    if not host:  # sockets take this for every address of the machine
        raise UserError("--host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all of this machine")
    try:
        ipv6 = ":" in host  # "::" takes IPv4 too
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=ipv6)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "ports are from 0 to 65535"
        raise UserError(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from error


def own_names(host: str) -> tuple[str, ...]:
    """Return the names by which a server at `host` may be asked; () for any, unless only this machine reaches it."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return (*LOOPBACK, f"[{host}]" if ":" in host else host) if local else ()
