"""The number of threads and processes that read images: from the cores, the size of a batch, and a few timed images.

Four threads of one process keep four cores busy, because decoding releases Python's lock and takes most of their time.
More cores are used by worker processes if the model runs on an accelerator. On a CPU, the training step needs these
cores.
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
from mlmoe_jax.runtime.text import quantity

THREADS = 4  # largest number per process
TIMED_IMAGES, TIMED_SECONDS = 8, 0.25  # the measurement ends after this number of images or this time
ENOUGH = 20_000  # images/s; no accelerator of one process takes more
MOST_AHEAD = 2 * GIB  # of batches that are read ahead; each thread has one batch in work and one batch ready
FOR_FEATURES = 2  # threads that copy stored features, which takes little time


@dataclass(frozen=True)
class Readers:
    """`workers` processes with `threads` threads each; 0 workers means threads of the main process."""

    threads: int
    workers: int

    def __str__(self) -> str:
        if not self.workers:
            return f"{quantity(self.threads, 'thread')}, no worker processes"
        return f"{self.workers} worker processes with {quantity(self.threads, 'thread')} each"


def seconds_per_image(read: Callable[[int], Any], rows: Sequence[int]) -> float:
    """Return the mean time of `read`, a function of a row. Unreadable images count too."""
    times: list[float] = []
    for row in [rows[0], *rows]:  # the first image loads libraries
        start = time.perf_counter()
        with contextlib.suppress(BadImage):  # reported when a batch needs the image
            read(row)
        times.append(time.perf_counter() - start)
        if sum(times[1:]) >= TIMED_SECONDS:
            break
    return sum(times[1:]) / len(times[1:])


def plan(seconds: float, usable: int, batch_bytes: int, *, accelerator: bool, threads: int, workers: int) -> Readers:
    """Return the number of threads and processes.

    Args:
      seconds: time of an image in one thread.
      usable: number of cores.
      batch_bytes: size of the images of a batch in this process.
      accelerator: whether the model runs on an accelerator.
      threads: number of threads, negative for auto.
      workers: number of processes, negative for auto.
    """
    ahead = max(1, MOST_AHEAD // (2 * batch_bytes))  # threads in all processes together
    if threads < 0:
        share = usable if workers <= 0 else math.ceil(usable / workers)
        threads = max(1, min(THREADS, share, ahead))
    if workers < 0:
        needed = min(usable // threads, math.ceil(ENOUGH * seconds / threads), ahead // threads)
        workers = needed if accelerator and usable > THREADS and needed > 1 else 0
    return Readers(threads, workers)


_SECONDS: dict[Any, float] = {}  # key -> seconds per image; a split is evaluated many times


def choose(read: Callable[[int], Any], images: int, key: Any, batch_bytes: int, threads: int, workers: int) -> Readers:
    """Return the readers of a split. If a number is auto, measure the time of an image and print the result.

    Args:
      read: function that reads the image of a row.
      images: number of images.
      key: everything that the time of an image depends on. The time is measured once per key and process.
      batch_bytes: size of the images of a batch in this process.
      threads: number of threads, negative for auto.
      workers: number of processes, negative for auto.
    """
    if threads >= 0 and workers >= 0:
        return Readers(threads, workers)
    usable, new = cores(), key not in _SECONDS
    if new:
        rows = np.linspace(0, images - 1, min(images, TIMED_IMAGES)).astype(int).tolist()
        _SECONDS[key] = seconds_per_image(read, rows)
    readers = plan(_SECONDS[key], usable, batch_bytes, accelerator=_accelerator(), threads=threads, workers=workers)
    if new:
        status(f"data: {readers} ({quantity(usable, 'core')}, {1e3 * _SECONDS[key]:.2g} ms per image)")
    return readers


def plan_for_few_images(threads: int, workers: int) -> dict[str, int]:
    """Return `threads` and `workers` with numbers for auto, without measuring the time of an image."""
    return {"threads": threads if threads > 0 else min(cores(), 2 * THREADS), "workers": max(0, workers)}


def _accelerator() -> bool:
    import jax  # here, because worker processes import this module and need no JAX

    return jax.default_backend() != "cpu"
