"""Batches on the device, and the batch loop of evaluation, prediction, features, explanations and pruning."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.machine import require_unforked
from mlmoe_jax.runtime.memory import shortage_explained
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.sharding import shard_batch

STEPS_IN_FLIGHT = 1  # steps dispatched after the step whose output is transferred, so that the device is never idle
STEPS_AHEAD = 2  # steps of training that the host runs ahead of the device


def device_batches(
    loader: Iterator[Arrays], mesh: Mesh, progress: Progress | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yield a loader's batches as global arrays on the mesh. While a batch is used, the next batch is transferred.

    If `progress` is given, it measures the time spent waiting for the loader.
    """
    current = None
    for batch in loader if progress is None else progress.waiting(loader):
        following = shard_batch(batch, mesh)
        if current is not None:
            yield current
        current = following
    if current is not None:
        yield current


class RunAhead:
    """A limit for asynchronous dispatch: the host runs at most STEPS_AHEAD steps ahead of the device.

    If STEPS_AHEAD is at least 1, the device never waits for the host to dispatch a step. Without a limit, the host
    would queue steps until some code reads a result. The batches of the queued steps would fill the memory of an
    accelerator. The measured wait for data would also be wrong, because the device would still be busy during this
    wait.
    """

    def __init__(self):
        self._results = deque()

    def add(self, result: Any) -> None:
        """Record the result of a newly dispatched step, and wait for the result of STEPS_AHEAD steps earlier."""
        self._results.append(result)
        if len(self._results) > STEPS_AHEAD:
            jax.block_until_ready(self._results.popleft())


def even_batch(images: int, most: int, devices: int) -> int:
    """Return a batch size of about `most` with which the last batch of `images` images needs little padding.

    It is over all devices, a multiple of their number.
    """
    batches = math.ceil(images / most)
    return devices * math.ceil(images / batches / devices)


def run_batches(
    step: Callable[[dict[str, jax.Array]], Any],
    loader: Iterator[Arrays],
    mesh: Mesh,
    *,
    advice: str,
    progress: Progress | None = None,
) -> Iterator[Any]:
    """Apply a compiled step to each batch of a loader. Yield the outputs as NumPy arrays, in the order of the batches.

    Args:
      step: a compiled function from a global batch on the mesh to a tree of arrays.
      loader: yields this process's part of each batch, as `data.pipeline.build_loader` does.
      advice: the end of the UserError if a device is out of memory: what the user can change.
      progress: is advanced once per batch, and closed at the end; None shows no progress.
    """
    require_unforked()
    outputs: deque[Any] = deque()
    with shortage_explained(advice), contextlib.closing(progress) if progress else contextlib.nullcontext():
        for batch in device_batches(loader, mesh, progress):
            outputs.append(step(batch))
            if progress:
                progress.advance()
            if len(outputs) > STEPS_IN_FLIGHT:
                yield jax.device_get(outputs.popleft())
        yield from map(jax.device_get, outputs)
