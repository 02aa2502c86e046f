"""How many threads and processes read images: from the cores, the size of a batch, and a few timed images.

Threads share a process as long as decoding, which releases Python's lock, takes most of their time: four threads keep
four cores busy. On more cores, further processes take the others if an accelerator waits for them: on a CPU, the
training step needs those cores itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlmoe_jax.data.images import BadImage
from mlmoe_jax.runtime.files import GIB
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import counted

THREADS = 4  # of a process, at most
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


def timed(read: Callable[[int], Any], rows: Sequence[int]) -> float:
    """Return the seconds that `read`, a function of a row, takes for an image; images that cannot be read count too."""
    times: list[float] = []
    for row in [rows[0], *rows]:  # the first image loads libraries
        began = time.perf_counter()
        with contextlib.suppress(BadImage):  # whoever needs the image reports it
            read(row)
        times.append(time.perf_counter() - began)
        if sum(times[1:]) >= TIMED_SECONDS:
            break
    return sum(times[1:]) / len(times[1:])


def chosen(seconds: float, usable: int, batch_bytes: int, *, accelerator: bool, threads: int, workers: int) -> Readers:
    """Return the number of threads and processes; `threads` and `workers` stay unless they are negative (auto).

    seconds: for an image, in one thread. usable: the number of cores. batch_bytes: of the images of a batch, this
    process's part. accelerator: whether the model runs on one.
    """
    ahead = max(1, MOST_AHEAD // (2 * batch_bytes))  # threads in all processes together
    if threads < 0:
        share = usable if workers <= 0 else math.ceil(usable / workers)
        threads = max(1, min(THREADS, share, ahead))
    if workers < 0:
        needed = min(usable // threads, math.ceil(ENOUGH * seconds / threads), ahead // threads)
        workers = needed if accelerator and usable > THREADS and needed > 1 else 0
    return Readers(threads, workers)


_TIMED: dict[Any, float] = {}  # a split is evaluated many times


def choose(read: Callable[[int], Any], images: int, key: Any, batch_bytes: int, threads: int, workers: int) -> Readers:
    """Return the readers for `images` images, which are timed, and said in one line, if any number is auto.

    key: what the time of an image depends on; images with the same key are timed once per process.
    """
    if threads >= 0 and workers >= 0:
        return Readers(threads, workers)
    usable, new = cores(), key not in _TIMED
    if new:
        rows = np.linspace(0, images - 1, min(images, TIMED_IMAGES)).astype(int).tolist()
        _TIMED[key] = timed(read, rows)
    readers = chosen(_TIMED[key], usable, batch_bytes, accelerator=_accelerator(), threads=threads, workers=workers)
    if new:
        status(f"data: {readers} ({counted(usable, 'core')}, {1e3 * _TIMED[key]:.2g} ms per image)")
    return readers


def untimed(threads: int, workers: int) -> dict[str, int]:
    """Return `threads` and `workers` with numbers for auto that need no timing, for few images."""
    return {"threads": threads if threads > 0 else min(cores(), 2 * THREADS), "workers": max(0, workers)}


def _accelerator() -> bool:
    import jax  # here, since worker processes import this module, and need no JAX

    return jax.default_backend() != "cpu"
