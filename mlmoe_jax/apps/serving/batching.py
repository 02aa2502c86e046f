"""A bounded queue of images, which are labeled in batches across requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any


class Full(Exception):
    """The queue has no room for further images."""


class Room:
    """The number of images that are being read, wait or are being labeled, and its limit."""

    def __init__(self, most: int):
        self.most, self.taken = most, 0

    @contextlib.contextmanager
    def reserved(self, images: int) -> Iterator[None]:
        """Reserve room for a number of images; raises Full."""
        if self.taken + images > self.most:
            raise Full
        self.taken += images
        try:
            yield
        finally:
            self.taken -= images


@dataclass(frozen=True)
class _Waiting:
    """An image in the queue; `since`: time of the event loop at which it arrived."""

    image: Any
    kind: str
    answer: asyncio.Future
    since: float


class Batcher:
    """Joins the images of several requests to batches, which are labeled one after another.

    label: (images, kind) -> one output per image, called in `device`. most: kind -> the largest batch. wait: the
    longest time in seconds that an image waits for others if no batch is being labeled; it does not wait if `coming`
    returns False. observe: called with the size of each batch.
    """

    def __init__(
        self,
        label: Callable[[Sequence[Any], str], Sequence[Any]],
        most: Mapping[str, int],
        *,
        wait: float,
        device: Executor,
        coming: Callable[[], bool] = lambda: True,
        observe: Callable[[int], None] = lambda size: None,
    ):
        self._label, self._most, self._wait, self._device = label, most, wait, device
        self._coming, self._observe = coming, observe
        self._queue: deque[_Waiting] = deque()
        self._changed, self._closing = asyncio.Event(), False

    def __len__(self) -> int:
        """Return the number of images that wait."""
        return len(self._queue)

    async def submit(self, images: Sequence[Any], kind: str) -> list[Any]:
        """Return the outputs for images, in their order; if the caller is cancelled, those that wait are left out.

        Raises what `label` raises.
        """
        loop = asyncio.get_running_loop()
        added = [_Waiting(image, kind, loop.create_future(), loop.time()) for image in images]
        self._queue.extend(added)
        self._changed.set()
        return await asyncio.gather(*(one.answer for one in added))

    async def run(self) -> None:
        """Label what arrives, until `close` was called and the queue is empty."""
        loop = asyncio.get_running_loop()
        while batch := await self._next():
            self._observe(len(batch))
            images = [one.image for one in batch]
            try:
                outputs = await loop.run_in_executor(self._device, self._label, images, batch[0].kind)
            except Exception as error:  # belongs to the requests of this batch; the next one may succeed
                for one in batch:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one, output in zip(batch, outputs, strict=True):
                if not one.answer.done():
                    one.answer.set_result(output)

    def close(self) -> None:
        """Let `run` end once the queue is empty."""
        self._closing = True
        self._changed.set()

    async def _next(self) -> list[_Waiting]:
        """Return the next batch, of the kind of the image that has waited longest; [] at the end."""
        loop = asyncio.get_running_loop()
        while True:
            self._queue = deque(one for one in self._queue if not one.answer.done())  # cancelled
            if not self._queue:
                if self._closing:
                    return []
                await self._change(None)
                continue
            kind = self._queue[0].kind
            batch = [one for one in self._queue if one.kind == kind][: self._most[kind]]
            left = self._queue[0].since + self._wait - loop.time()
            if left > 0 and len(batch) < self._most[kind] and self._coming() and not self._closing:
                await self._change(left)
                continue
            taken = set(map(id, batch))
            self._queue = deque(one for one in self._queue if id(one) not in taken)
            return batch

    async def _change(self, seconds: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
