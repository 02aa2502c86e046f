"""The batch loop of evaluation, prediction, features, explanations and pruning."""

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
from mlmoe_jax.runtime.sharding import on_device

BEHIND = 1  # steps between the dispatch of a step and the transfer of its output, so that the device is never idle


def device_batches(
    loader: Iterator[dict[str, np.ndarray]], mesh: Mesh, progress: Progress | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yield the batches of a loader as global arrays on the mesh, and measure in `progress` the wait for each."""
    return on_device(loader if progress is None else progress.waiting(loader), mesh)


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
            if len(outputs) > BEHIND:
                yield jax.device_get(outputs.popleft())
        yield from map(jax.device_get, outputs)
