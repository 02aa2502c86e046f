"""Load a server of `mlmoe serve` with several clients at once: latency, images per second, and lost answers.

    python -m benchmarks.measure serving --address=http://127.0.0.1:8000 --folder=photos --seconds=15 --clients=1,8,32

--folder has the images, of which the first --images are sent. Each client keeps one connection and sends one image
after another, in random order. A refusal (429) is counted and repeated after the time in Retry-After; the waiting is
part of the latency. An answer counts as lost if it does not come, has another status, or differs from the first answer
for the image by more than 1e-3 (batches of other sizes round differently).

--hostile=N adds N clients that send bodies in pieces of one byte, heads and trailers without an end, half bodies,
random bytes, and requests without reading an answer, each with at most 100 kB/s, and open a new connection when one is
closed.
"""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.report import heading, row
from mlmoe_jax.runtime.table import Column

TOLERANCE = 1e-3
_START = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
# What a hostile client sends: the start of a connection, and what follows without an end.
HOSTILE = (
    (_START + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 170),
    (_START, b"X: y\r\n" * 170),
    (_START + b"Content-Length: 16000000\r\n\r\n", b"x" * 1000),
    (b"", bytes(random.Random(0).randbytes(1000))),
    (_START + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"T: v\r\n" * 170),
    (b"", (_START + b"Content-Length: 0\r\n\r\n") * 10),
)


@dataclass
class Outcome:
    """The observations of the clients of one round."""

    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    failures: int = 0


def ask(connection: http.client.HTTPConnection, content: bytes) -> tuple[int, str | None, dict]:
    """Send an image; return the status, Retry-After, and the answer."""
    connection.request("POST", "/predict", content, {"Content-Type": "application/octet-stream"})
    answer = connection.getresponse()
    return answer.status, answer.headers.get("Retry-After"), json.loads(answer.read())


def client(address: str, images: dict[str, bytes], known: dict[str, list[float]], until: float, seed: int) -> Outcome:
    """Send images until the time is over."""
    outcome, draw = Outcome(), random.Random(seed)
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    while time.perf_counter() < until:
        name, started = draw.choice(list(images)), time.perf_counter()
        try:
            status, after, body = ask(connection, images[name])
            while status == 429:
                outcome.refused += 1
                time.sleep(float(after))
                status, after, body = ask(connection, images[name])
        except (OSError, http.client.HTTPException, ValueError):
            connection.close()
            outcome.failures += 1
            continue
        scores = list(body["results"][0]["scores"].values()) if status == 200 else None
        if scores is None or not np.allclose(scores, known.setdefault(name, scores), rtol=0, atol=TOLERANCE):
            outcome.failures += 1
        outcome.latencies.append(time.perf_counter() - started)
    connection.close()
    return outcome


def attack(address: str, number: int, stopped: threading.Event) -> None:
    """Be the hostile client `number` until `stopped` is set."""
    host, port = urlsplit(address).netloc.split(":")
    start, rest = HOSTILE[number % len(HOSTILE)]
    while not stopped.wait(0.01):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(start)
            while not stopped.wait(len(rest) / 100_000):
                connection.sendall(rest)


@contextlib.contextmanager
def attacked(address: str, clients: int) -> Iterator[None]:
    """Run hostile clients in the background."""
    stopped = threading.Event()
    with ThreadPoolExecutor(max(1, clients)) as threads:
        running = [threads.submit(attack, address, number, stopped) for number in range(clients)]
        try:
            yield
        finally:
            stopped.set()
    for one in running:
        one.result()


def load(address: str, images: dict[str, bytes], clients: int, seconds: float, known: dict) -> Outcome:
    """Return the joint outcome of `clients` clients."""
    until = time.perf_counter() + seconds
    with ThreadPoolExecutor(clients) as threads:
        outcomes = list(threads.map(lambda seed: client(address, images, known, until, seed), range(clients)))
    return Outcome(
        [latency for one in outcomes for latency in one.latencies],
        sum(one.refused for one in outcomes),
        sum(one.failures for one in outcomes),
    )


@dataclass(frozen=True)
class Options:
    address: str
    folder: Path
    seconds: float = 15
    clients: tuple[int, ...] = (1, 8, 32)
    images: int = 200
    hostile: int = 0


def measure(options: Options) -> Iterator[str]:
    files = sorted(path for path in options.folder.iterdir() if path.is_file())[: options.images]
    images, known = {path.name: path.read_bytes() for path in files}, {}
    yield heading(Column("clients"), "images/s", "p50 ms", "p95 ms", "p99 ms", "answers", "refused", "lost")
    for clients in options.clients:
        started = time.perf_counter()
        with attacked(options.address, options.hostile):
            outcome = load(options.address, images, clients, options.seconds, known)
        rate = len(outcome.latencies) / (time.perf_counter() - started)
        speeds = (rate, *1000 * np.percentile(outcome.latencies, [50, 95, 99]))
        counts = (len(outcome.latencies), outcome.refused, outcome.failures)
        yield row(clients, *(f"{value:.0f}" for value in speeds), *(f"{count:,}" for count in counts))
