"""Batches on the device, and the batch loop of evaluation, prediction, features, explanations and pruning."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mlmoe_jax.runtime.memory import shortage_explained
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.sharding import shard_batch

STEPS_IN_FLIGHT = 1  # steps dispatched after the step whose output is transferred, so that the device is never idle


def device_batches(
    loader: Iterator[dict[str, np.ndarray]], mesh: Mesh, progress: Progress | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yield the batches of a loader as global arrays on the mesh, and measure in `progress` the wait for each.

    The next batch is transferred while the current one is used.
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
    """Keeps the host at most `steps` steps ahead of the device, which is then never idle.

    Without it the host would queue steps until something reads a result. The batches of the queued steps would fill the
    memory of an accelerator, and the measured wait for data would not be time in which the device waits.
    """

    def __init__(self, steps: int = 2):
        self._limit, self._results = steps, deque()

    def add(self, result: Any) -> None:
        """Record the result of a step that was just dispatched, and wait for the result `steps` steps earlier."""
        self._results.append(result)
        if len(self._results) > self._limit:
            jax.block_until_ready(self._results.popleft())


def run_batches(
    step: Callable[[dict[str, jax.Array]], Any],
    loader: Iterator[dict[str, np.ndarray]],
    mesh: Mesh,
    *,
    advice: str,
    progress: Progress | None = None,
) -> Iterator[Any]:
    """Apply a compiled step to each batch of a loader; yield its outputs on the host, in order.

    Args:
      step: global batch on the mesh -> tree of arrays.
      loader: this process's part of each batch, as `data.pipeline.build_loader` returns it.
      mesh: the mesh on which the step runs.
      advice: what to change if a device is out of memory, for the message.
      progress: advanced once per batch, and closed at the end.

    Raises:
      UserError: a device is out of memory.
    """
    outputs: deque[Any] = deque()
    with shortage_explained(advice), contextlib.closing(progress) if progress else contextlib.nullcontext():
        for batch in device_batches(loader, mesh, progress):
            outputs.append(step(batch))
            if progress:
                progress.advance()
            if len(outputs) > STEPS_IN_FLIGHT:
                yield jax.device_get(outputs.popleft())
        yield from map(jax.device_get, outputs)
