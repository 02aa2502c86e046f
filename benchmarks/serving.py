"""Load a server of --mode=serve with several clients at once: latency, images per second, and lost answers.

    python -m benchmarks.serving http://127.0.0.1:8000 photos --seconds=15 --clients=1,8,32

`photos` is a folder of images. Each client keeps one connection and sends one image after another, in random order.
A refusal (429) is counted and repeated after the time in Retry-After; the waiting is part of the latency.
An answer counts as lost if it does not come, has another status, or differs from the first answer for the image by more
than 1e-3 (batches of other sizes round differently).
"""

import argparse
import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

TOLERANCE = 1e-3


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


def load(address: str, images: dict[str, bytes], clients: int, seconds: float, known: dict) -> Outcome:
    """Return the joint outcome of `clients` clients."""
    outcomes: list[Outcome] = []
    until = time.perf_counter() + seconds
    threads = [
        threading.Thread(target=lambda seed=seed: outcomes.append(client(address, images, known, until, seed)))
        for seed in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Outcome(
        [latency for one in outcomes for latency in one.latencies],
        sum(one.refused for one in outcomes),
        sum(one.failures for one in outcomes) + clients - len(outcomes),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--images", type=int, default=200, help="the number of different images")
    options = parser.parse_args()
    files = sorted(path for path in Path(options.folder).iterdir() if path.is_file())[: options.images]
    images, known = {path.name: path.read_bytes() for path in files}, {}
    print("| clients | images/s | p50 ms | p95 ms | answers | refused | lost |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for clients in map(int, options.clients.split(",")):
        started = time.perf_counter()
        outcome = load(options.address, images, clients, options.seconds, known)
        rate = len(outcome.latencies) / (time.perf_counter() - started)
        middle, high = 1000 * np.percentile(outcome.latencies, [50, 95])
        counts = f"{len(outcome.latencies):,} | {outcome.refused:,} | {outcome.failures:,}"
        print(f"| {clients} | {rate:.0f} | {middle:.0f} | {high:.0f} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
