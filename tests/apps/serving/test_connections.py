"""Limits of connections, with a server in a thread of this process and an application that reads the whole body."""

import contextlib
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.color_server import in_thread
from helpers.jobs import until
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlmoe_jax.apps.serving import connections
from mlmoe_jax.apps.serving.connections import LimitedServer
from mlmoe_jax.apps.serving.service import ServerMetrics

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"


async def read(request: Request) -> Response:
    with contextlib.suppress(ClientDisconnect):
        await request.body()
    return Response(status_code=204)


@pytest.fixture
def client(monkeypatch):
    """`connect` connects from an address, sends bytes and returns the socket; `stop` stops the server."""
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "REST_SECONDS", 0.3)
    metrics = ServerMetrics((1,), queue_images=int, taken_images=int, replaced_readers=int)
    server = LimitedServer(Starlette(routes=[Route("/", read, methods=["POST"])]), SimpleNamespace(metrics=metrics), 0)
    with (
        contextlib.ExitStack() as opened,
        in_thread(server) as (address, stop),
    ):

        def connect(host: str, content: bytes = b"") -> socket.socket:
            connection = opened.enter_context(socket.create_connection(address, 30, (host, 0)))
            connection.sendall(content)
            return connection

        yield SimpleNamespace(connect=connect, stop=stop, server=server, metrics=metrics)


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
    connect = client.connect
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
    connect = client.connect
    many = [connect("127.0.0.1") for _ in range(12)]
    until(lambda: sum(map(is_closed, many)) >= 8)
    assert [is_closed(connection) for connection in many] == [True] * 8 + [False] * 4


def test_a_request_whose_head_does_not_arrive_is_closed_and_one_that_is_answered_is_not(client, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    connect = client.connect
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
    connect, stop = client.connect, client.stop
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


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_of_tiny_pieces_is_refused_and_counted_and_costs_other_clients_nothing(client):
    hostile = [client.connect("127.0.0.1", CHUNKED) for _ in range(3)]
    for connection in hostile:
        with contextlib.suppress(OSError):  # the server may close while the rest is sent
            connection.sendall(b"1\r\nx\r\n" * 200_000)
    started = time.monotonic()
    assert client.connect("127.0.0.1", HEAD + b"\r\nabcd").recv(100).startswith(b"HTTP/1.1 204 ")
    assert time.monotonic() - started < 5
    until(lambda: refused(client) == 3)
    assert all(map(is_refused, hostile))


def refused(client) -> float:
    return client.metrics.refused._value.get()


def is_refused(connection: socket.socket) -> bool:
    try:
        return connection.recv(1000).startswith((b"HTTP/1.1 400 ", b""))
    except ConnectionResetError:
        return True


def test_a_body_of_many_usual_pieces_is_read(client):
    connection = client.connect("127.0.0.1", CHUNKED)
    connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
    for _ in range(20):
        connection.sendall((b"400\r\n" + b"x" * 1024 + b"\r\n") * 500)
    connection.sendall(b"0\r\n\r\n")
    assert connection.recv(100).startswith(b"HTTP/1.1 204 ")
    assert refused(client) == 0


@pytest.mark.parametrize("before", [b"", HEAD + b"\r\nabcd"], ids=["first", "second"])
def test_a_head_without_an_end_is_refused(client, before):
    connection = client.connect("127.0.0.1", before)
    if before:
        assert connection.recv(100).startswith(b"HTTP/1.1 204 ")
    with contextlib.suppress(OSError):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(40):
            connection.sendall(b"X: " + b"a" * 10_000 + b"\r\n")
    until(lambda: refused(client) == 1)


@pytest.mark.parametrize(
    "sent",
    [CHUNKED + b"1\r\nx\r\n0\r\n" + b"T: v\r\n" * 5000, (HEAD + b"\r\nabcd") * 100],
    ids=["a trailer without an end", "many requests before an answer"],
)
def test_what_takes_work_before_any_answer_is_refused(client, sent):
    connection = client.connect("127.0.0.1")
    with contextlib.suppress(OSError):
        connection.sendall(sent)
    until(lambda: refused(client) == 1)
    assert is_refused(connection)


def test_a_short_trailer_and_a_few_requests_at_once_are_read(client):
    trailer = CHUNKED + b"1\r\nx\r\n0\r\nT: v\r\n\r\n"
    connection = client.connect(
        "127.0.0.1", trailer + (HEAD + b"\r\nabcd") * 9 + HEAD + b"Connection: close\r\n\r\nabcd"
    )
    with connection.makefile("rb") as answers:
        assert answers.read().count(b"HTTP/1.1 204 ") == 11
    assert refused(client) == 0


def test_what_has_been_sent_before_a_stop_is_answered(client, monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 64)
    sent = [client.connect("127.0.0.1", HEAD + b"\r\nabcd") for _ in range(50)]
    client.stop()
    assert [connection.recv(100)[:13] for connection in sent] == [b"HTTP/1.1 204 "] * 50
    assert client.server.dropped == 0


def test_requests_that_do_not_arrive_before_a_stop_are_counted(client):
    for _ in range(2):
        client.connect("127.0.0.1", HEAD + b"\r\nab")
    time.sleep(0.2)
    client.stop()
    assert client.server.dropped == 2
