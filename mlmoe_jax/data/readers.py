"""How many threads and processes read images: from the cores, the size of a batch, and a few timed images.

Threads share a process as long as decoding, which releases Python's lock, takes most of their time. On few cores they
always suffice. On more, the speed-up of several threads is measured, and further processes take the cores that threads
cannot keep busy, if an accelerator waits for them: on a CPU, the training step needs those cores itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlmoe_jax.data.images import BadImage
from mlmoe_jax.runtime.files import GIB
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import counted

FEW_CORES = 4  # on which threads alone are used, and their speed-up need not be measured
TIMED_THREADS = 8  # at most, of which the speed-up is measured
TIMED_IMAGES, TIMED_SECONDS = 8, 0.25  # the sample ends after this number or this time
ENOUGH = 20_000  # images/s that no process feeds to its accelerators
MOST_AHEAD = 2 * GIB  # of batches that are read ahead; each thread has one in work and one finished
FOR_FEATURES = 2  # threads that copy stored features, for which no cores are needed


@dataclass(frozen=True)
class Readers:
    """`workers` processes with `threads` threads each; 0 workers = the threads of the main process."""

    threads: int
    workers: int

    def __str__(self) -> str:
        if not self.workers:
            return f"{counted(self.threads, 'thread')}, no worker processes"
        return f"{self.workers} worker processes with {counted(self.threads, 'thread')} each"


@dataclass(frozen=True)
class Timing:
    """What the sample showed: `seconds` per image in one thread, and how much faster several threads are together."""

    seconds: float
    speedup: float


def measured(read: Callable[[int], Any], rows: Sequence[int], usable: int) -> Timing:
    """Time `read`, a function of a row, on a few rows; images that cannot be read are left out.

    The speed-up is only measured if more than FEW_CORES are `usable`, otherwise it is their number.
    """

    def attempt(row: int) -> float:
        began = time.perf_counter()
        with contextlib.suppress(BadImage):  # whoever needs the image reports it
            read(row)
        return time.perf_counter() - began

    attempt(rows[0])  # the first image loads libraries
    times: list[float] = []
    while len(times) < min(len(rows), TIMED_IMAGES) and sum(times) < TIMED_SECONDS:
        times.append(attempt(rows[len(times)]))
    seconds, threads = sum(times) / len(times), min(usable, TIMED_THREADS)
    if usable <= FEW_CORES:
        return Timing(seconds, usable)
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(attempt, list(rows[: len(times)]) * threads))
        together = time.perf_counter() - began
    return Timing(seconds, max(1.0, sum(times) * threads / together))


def chosen(timing: Timing, usable: int, batch_bytes: int, *, accelerator: bool, threads: int, workers: int) -> Readers:
    """Return the number of threads and processes; `threads` and `workers` are kept unless they are negative (auto).

    usable: the number of cores. batch_bytes: of the images of a batch, this process's part. accelerator: whether the
    model runs on one.
    """
    ahead = max(1, MOST_AHEAD // (2 * batch_bytes))  # threads in all processes together
    if threads < 0:
        share = usable if workers <= 0 else math.ceil(usable / workers)
        threads = max(1, min(round(timing.speedup), share, ahead))
    if workers < 0:
        rate = min(threads, timing.speedup) / timing.seconds  # images/s of one process
        wanted = min(usable // threads, math.ceil(ENOUGH / rate), ahead // threads)
        workers = wanted if accelerator and usable > FEW_CORES and wanted > 1 else 0
    return Readers(threads, workers)


_TIMED: dict[Any, Timing] = {}  # a split is evaluated many times


def choose(read: Callable[[int], Any], images: int, key: Any, batch_bytes: int, threads: int, workers: int) -> Readers:
    """Return the readers for `images` images, which are timed, and said in one line, if any number is auto.

    key: what the time of an image depends on; images with the same key are timed once per process. batch_bytes,
    threads, workers: as in `chosen`.
    """
    if threads >= 0 and workers >= 0:
        return Readers(threads, workers)
    usable, new = cores(), key not in _TIMED
    if new:
        rows = np.linspace(0, images - 1, min(images, TIMED_IMAGES)).astype(int).tolist()
        _TIMED[key] = measured(read, rows, usable)
    timing = _TIMED[key]
    readers = chosen(timing, usable, batch_bytes, accelerator=_accelerator(), threads=threads, workers=workers)
    if new:
        status(f"data: {readers} ({counted(usable, 'core')}, {1e3 * timing.seconds:.2g} ms per image)")
    return readers


def untimed(threads: int, workers: int) -> dict[str, int]:
    """Return `threads` and `workers` with numbers for auto that need no timing, for few images of unknown sizes."""
    return {"threads": threads if threads > 0 else min(cores(), TIMED_THREADS), "workers": max(0, workers)}


def _accelerator() -> bool:
    import jax  # here, since worker processes import this module, and need no JAX

    return jax.default_backend() != "cpu"
