"""Limits of connections, with a server in a thread of this process and an application that reads the whole body."""

import contextlib
import socket
import sys
import threading
import time

import pytest
from helpers.color_server import in_thread
from helpers.jobs import until
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlmoe_jax.apps.serving import connections
from mlmoe_jax.apps.serving.connections import LimitedServer

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"


async def read(request: Request) -> Response:
    with contextlib.suppress(ClientDisconnect):
        await request.body()
    return Response(status_code=204)


@pytest.fixture
def client(monkeypatch):
    """A function that connects from an address, sends bytes and returns the socket; and a function that stops."""
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "REST_SECONDS", 0.3)
    with (
        contextlib.ExitStack() as opened,
        in_thread(LimitedServer(Starlette(routes=[Route("/", read, methods=["POST"])]), None, 0)) as (address, stop),
    ):

        def connect(host: str, content: bytes = b"") -> socket.socket:
            connection = opened.enter_context(socket.create_connection(address, 30, (host, 0)))
            connection.sendall(content)
            return connection

        yield connect, stop


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection, without an answer."""
    connection.settimeout(0.1)
    try:
        return connection.recv(100) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have only one loopback address")
def test_a_client_with_many_connections_loses_its_own(client):
    connect, _ = client
    other = connect("127.0.0.2", HEAD)
    many = [connect("127.0.0.1", content) for content in (HEAD, HEAD + b"\r\nab", b"")]
    assert connect("127.0.0.1", HEAD + b"\r\nabcd").recv(100).startswith(b"HTTP/1.1 204 ")
    assert connect("127.0.0.3", HEAD + b"\r\nabcd").recv(100).startswith(b"HTTP/1.1 204 ")
    until(lambda: sum(map(is_closed, many)) >= 2)
    assert sum(map(is_closed, many)) == 2
    other.sendall(b"\r\nabcd")
    assert other.recv(100).startswith(b"HTTP/1.1 204 ")


def test_connections_that_were_opened_at_once_are_closed_from_the_oldest_on(client):
    """The loop reads its clock once for all of them."""
    connect, _ = client
    many = [connect("127.0.0.1") for _ in range(12)]
    until(lambda: sum(map(is_closed, many)) >= 8)
    assert [is_closed(connection) for connection in many] == [True] * 8 + [False] * 4


def test_a_request_whose_head_does_not_arrive_is_closed_and_one_that_is_answered_is_not(client, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    connect, _ = client
    started, slow, idle = time.monotonic(), connect("127.0.0.1", HEAD), connect("127.0.0.1")
    fine = connect("127.0.0.1", HEAD + b"\r\nabc")
    for connection in (slow, idle):
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert time.monotonic() - started > 0.4
    fine.sendall(b"d")
    assert fine.recv(100).startswith(b"HTTP/1.1 204 ")
    fine.sendall(HEAD)
    with contextlib.suppress(ConnectionResetError):
        assert fine.recv(100) == b"", "the next request has no time without end either"


def test_a_server_stops_although_bodies_are_half_sent(client, monkeypatch):
    monkeypatch.setattr(connections, "REST_SECONDS", 1.0)  # long after the rest of a body is sent, also on busy cores
    connect, stop = client
    for content in (HEAD, HEAD + b"\r\nab", b""):
        connect("127.0.0.1", content)
    late = connect("127.0.0.1", HEAD + b"\r\nab")
    time.sleep(0.3)
    timer = threading.Timer(0.2, late.sendall, (b"cd",))
    timer.start()
    started = time.monotonic()
    stop()
    assert time.monotonic() - started < 4
    assert late.recv(100).startswith(b"HTTP/1.1 204 "), "it arrived while the server was stopping"
