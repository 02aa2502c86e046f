"""Limits that uvicorn does not have: on connections, on what a client sends, on its time, on the time to stop."""

import asyncio
import itertools
import os
import resource
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mlmoe_jax.apps.serving.request_images import LIMITS
from mlmoe_jax.apps.serving.service import Service
from mlmoe_jax.errors import INTERRUPTED
from mlmoe_jax.runtime.progress import status

HEAD_SECONDS = 10.0  # the longest time until the head of a request has arrived
_ANSWER_SECONDS = LIMITS.seconds + 15  # and from there until its answer is read
# After SIGTERM or Ctrl-C: for the rest of a body, for answers, and until the process ends, whatever it does. A
# container is killed after 10 s.
REST_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 2.0, 5, 8.0
_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1 = no limit
MOST_CONNECTIONS = 256 if _DESCRIPTORS < 0 else min(256, _DESCRIPTORS // 2)
BACKLOG = 128  # connections that wait to be accepted; each accepted one needs a descriptor before another is closed
MOST_HEAD = 64 << 10  # bytes of the head of a request, and of the trailer of a chunked body
_LINE = 100  # bytes as which each line of a trailer counts besides its own: a line takes memory
MOST_WAITING = 16  # requests on a connection that a client has sent before the answer to an earlier one
# A body costs time per piece, so it may have this many pieces, or more if they have LEAST_PIECE bytes on average.
MOST_PIECES, LEAST_PIECE = 4096, 256
ARRIVAL_SECONDS = 0.3  # after a signal, for what clients have sent to arrive
_WAITS = itertools.count()  # the clock of the loop does not order them: it may stand while several begin


class LimitedConnection(HttpToolsProtocol):
    """A connection of a client. `refuse` is called if the client breaks a limit, and `drop` if it gets no answer.

    If there are more than MOST_CONNECTIONS connections, the server closes one on which it waits for the client to send.
    It takes the client with the largest number of connections, and of this client the connection with the longest wait.
    Therefore, a client that opens many connections, or sends slowly, only displaces its own connections. If the server
    waits on no connection, it closes the new one.
    """

    def __init__(self, *given: Any, refuse: Callable[[], None], drop: Callable[[], None], **further: Any):
        super().__init__(*given, **further)
        self._refuse, self._drop = refuse, drop
        self._head = self._pieces = self._bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Accept the connection, and close another one if there are too many."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._watch()
        opened = [one for one in self.connections if not one.transport.is_closing()]
        if len(opened) > MOST_CONNECTIONS:
            counts = Counter(one.host for one in opened)
            waiting = [one for one in opened if one.is_awaited and one is not self] or [self]
            max(waiting, key=lambda one: (counts[one.host], -one.wait)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, which may begin a request."""
        before, of_body = self.cycle, self.cycle is not None and self.cycle.more_body
        super().data_received(data)
        if self.cycle is not before:
            self._head = self._pieces = self._bytes = 0
            self._watch()
        elif not of_body:
            self._head += len(data)
            if self._head > MOST_HEAD:
                self._refuse()
                self.transport.abort()

    def on_message_begin(self) -> None:
        """Begin a request. Raise ValueError, which becomes the status 400, if too many wait before it."""
        if len(self.pipeline) >= MOST_WAITING:
            raise ValueError(f"{len(self.pipeline)} requests wait on this connection")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a line of a head, or of the trailer of a body. Raise ValueError if the trailer is too long."""
        if self.cycle is not None and self.cycle.more_body:
            self._head += len(name) + len(value) + _LINE
            if self._head > MOST_HEAD:
                raise ValueError(f"a trailer has more than {MOST_HEAD} bytes")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body. Raise ValueError, which becomes the status 400, if the pieces are too small."""
        self._pieces += 1
        self._bytes += len(body)
        if self._pieces > MOST_PIECES and self._bytes < LEAST_PIECE * self._pieces:
            raise ValueError(f"a body of {self._pieces} pieces has {self._bytes} bytes")
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse()
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def shutdown(self) -> None:
        """Close the connection once its request is answered. The rest of a body has REST_SECONDS to arrive."""
        super().shutdown()
        if self.is_arriving:
            self._timer.cancel()
            self._timer = self.loop.call_later(REST_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.is_arriving:
            self._drop()
            self.transport.abort()

    @property
    def host(self) -> str:
        """The address of the client, without the port."""
        return self.client[0] if self.client else ""

    @property
    def is_arriving(self) -> bool:
        """Whether a part of a request has arrived, and it has no answer yet."""
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete

    @property
    def is_awaited(self) -> bool:
        """Whether the server waits for a new request or for the rest of a request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _watch(self) -> None:
        """Restart the timer that aborts the connection.

        On an idle connection, the head of the next request has HEAD_SECONDS to arrive. After the head has arrived, the
        answer must be read within _ANSWER_SECONDS.
        """
        if self._timer:
            self._timer.cancel()
        idle = self.cycle is None or self.cycle.response_complete
        self.wait = next(_WAITS)
        self._timer = self.loop.call_later(HEAD_SECONDS if idle else _ANSWER_SECONDS, self.transport.abort)


class LimitedServer(uvicorn.Server):
    """A server of limited connections that ends the process if it still runs STOP_SECONDS after a signal.

    `code` is the exit code after SIGTERM. `deadline` is the timer that ends the process: cancel it once the server has
    stopped. `dropped` is the number of requests that got no answer because the server stopped.
    """

    def __init__(self, app: ASGIApp, service: Service, code: int):
        self.dropped = 0
        # A client causes warnings; they are counted in `mlmoe_refused_connections`.
        quiet = {"log_level": "error", "access_log": False, "server_header": False, "proxy_headers": False}
        connection = partial(LimitedConnection, refuse=service.metrics.refused.inc, drop=self._count_dropped)
        limits = {"http": connection, "backlog": BACKLOG, "timeout_graceful_shutdown": ANSWER_SECONDS}
        super().__init__(uvicorn.Config(app, lifespan="on", ws="none", **limits, **quiet))
        self._service, self._code = service, code
        self.deadline = threading.Timer(STOP_SECONDS, self._end)
        self.deadline.daemon = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop."""
        if not self.should_exit:
            self.deadline.start()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept and read what clients have sent, stop to listen, and wait for the answers."""
        await asyncio.sleep(ARRIVAL_SECONDS)
        await super().shutdown(sockets)

    def _count_dropped(self) -> None:
        self.dropped += 1

    def _end(self) -> None:
        status(f"stopped after {STOP_SECONDS:g} s; images that are not labeled: {self._service.active}")
        self._service.readers.kill()
        os._exit(INTERRUPTED if signal.SIGINT in self._captured_signals else self._code)
