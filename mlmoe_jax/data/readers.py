"""The number of threads and processes that read the images of a split.

Four threads of one process keep four cores busy, because decoding releases Python's lock and takes most of their time.
More cores are used by worker processes if images have to be decoded and the model runs on an accelerator. On a CPU, the
training step needs these cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlmoe_jax.runtime.files import GIB
from mlmoe_jax.runtime.machine import cores

MOST_THREADS = 4  # per process
MOST_WORKERS = 16  # processes, which deliver 20,000 photographs/s; no accelerator takes more
MOST_AHEAD = 2 * GIB  # of batches that are read ahead; each thread has one batch in work and one batch ready
FEATURE_THREADS = 2  # threads that copy stored features, which takes little time


@dataclass(frozen=True)
class Readers:
    """`workers` processes with `threads` threads each; 0 workers means threads of the main process."""

    threads: int
    workers: int


def plan_readers(threads: int, workers: int, *, batch_bytes: int, decodes: bool) -> Readers:
    """Return the number of threads and processes.

    Args:
      threads: number of threads per process, negative for auto.
      workers: number of processes, negative for auto.
      batch_bytes: size of the images of a batch in this process.
      decodes: whether images have to be decoded or rendered.
    """
    usable = cores()
    ahead = max(1, MOST_AHEAD // (2 * batch_bytes))  # threads in all processes together
    if threads < 0:
        share = usable if workers <= 0 else math.ceil(usable / workers)
        threads = max(1, min(MOST_THREADS, share, ahead))
    if workers < 0:
        workers = min(usable // threads, MOST_WORKERS, ahead // threads)
        if not (decodes and workers > 1 and usable > MOST_THREADS and _has_accelerator()):
            workers = 0
    return Readers(threads, workers)


def plan_for_few_images(threads: int, workers: int) -> dict[str, int]:
    """Return `threads` and `workers` for a prediction, which starts no process unless it is asked to."""
    return {"threads": threads if threads > 0 else min(cores(), 2 * MOST_THREADS), "workers": max(0, workers)}


def _has_accelerator() -> bool:
    import jax  # here, because worker processes import this module and need no JAX

    return jax.default_backend() != "cpu"
