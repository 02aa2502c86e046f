"""A queue of images, which are labeled in batches across requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Waiting:
    """An image in the queue. `since` is its arrival, in the time of the event loop."""

    image: Any
    kind: str
    answer: asyncio.Future
    since: float


class Batcher:
    """Joins the images of several requests into batches, which are labeled one after another.

    Args:
      label: (images, kind) -> one output per image, called in `device`.
      most: kind -> the largest batch.
      share: (number of waiting images, kind) -> number of images in the next batch.
      wait: the longest time in seconds that an image waits for more images if no batch is in progress.
      device: the thread that calls `label`.
      coming: an image does not wait if this returns False.
    """

    def __init__(
        self,
        label: Callable[[Sequence[Any], str], Sequence[Any]],
        most: Mapping[str, int],
        *,
        share: Callable[[int, str], int] = lambda waiting, kind: waiting,
        wait: float,
        device: Executor,
        coming: Callable[[], bool] = lambda: True,
    ):
        self._label, self._most, self._wait, self._device, self._coming = label, most, wait, device, coming
        self._share, self._queue = share, list[_Waiting]()
        self._changed, self._closing = asyncio.Event(), False

    def __len__(self) -> int:
        return len(self._queue)

    async def submit(self, images: Sequence[Any], kind: str) -> list[Any]:
        """Return the outputs of images, in order; if the caller is canceled, waiting images leave the queue.

        Raises the exceptions of `label`.
        """
        loop = asyncio.get_running_loop()
        added = [_Waiting(image, kind, loop.create_future(), loop.time()) for image in images]
        self._queue.extend(added)
        self._changed.set()
        return await asyncio.gather(*(one.answer for one in added))

    async def run(self) -> None:
        """Label images until `close` was called and the queue is empty."""
        loop = asyncio.get_running_loop()
        while batch := await self._next():
            images = [one.image for one in batch]
            try:
                outputs = await loop.run_in_executor(self._device, self._label, images, batch[0].kind)
            except Exception as error:  # an error of the requests of this batch only
                outputs = [error] * len(batch)
            for one, output in zip(batch, outputs, strict=True):
                if not one.answer.done():
                    resolve = one.answer.set_exception if isinstance(output, Exception) else one.answer.set_result
                    resolve(output)

    def close(self) -> None:
        """Let `run` end once the queue is empty."""
        self._closing = True
        self._changed.set()

    async def _next(self) -> list[_Waiting]:
        """Return the next batch, whose kind is the kind of the oldest image; [] at the end."""
        while True:
            self._queue = [one for one in self._queue if not one.answer.done()]  # without canceled images
            seconds = None
            if self._queue:
                first = self._queue[0]
                batch = [one for one in self._queue if one.kind == first.kind][: self._most[first.kind]]
                seconds = first.since + self._wait - asyncio.get_running_loop().time()
                full = len(batch) == self._most[first.kind]
                if seconds <= 0 or full or self._closing or not self._coming():
                    batch = batch[: self._share(len(batch), first.kind)]
                    ids = set(map(id, batch))
                    self._queue = [one for one in self._queue if id(one) not in ids]
                    return batch
            elif self._closing:
                return []
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
