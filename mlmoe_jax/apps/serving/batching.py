"""A queue of images. Its batches may contain images of several requests."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mlmoe_jax.apps.serving.labeler import Labeler


@dataclass(frozen=True)
class _Waiting:
    """An image in the queue.

    Attributes:
      kind: the kind of output to compute, see `Batcher`.
      answer: the future that receives the output.
      since: the time of arrival, in the clock of the event loop.
    """

    image: Any
    kind: str
    answer: asyncio.Future
    since: float


class Batcher:
    """A queue that joins the images of several requests into batches and labels one batch after another.

    All images of a batch have the same kind of output, such as LABELED or EXPLAINED of labeler.py.

    Args:
      observe: function that is called with the number of images of each batch.
      wait: the longest time in seconds that an image waits for more images while no batch is in progress.
      more_expected: function that returns whether more images will arrive soon. If it returns False, no image waits.
    """

    def __init__(
        self,
        labeler: Labeler,
        observe: Callable[[int], None],
        *,
        wait: float,
        more_expected: Callable[[], bool],
    ):
        self._labeler, self._observe, self._wait, self._more_expected = labeler, observe, wait, more_expected
        self._device = ThreadPoolExecutor(1, "device")  # of one thread, so that only one batch takes memory
        self._queue: list[_Waiting] = []
        self._changed, self._closing = asyncio.Event(), False

    def __len__(self) -> int:
        return len(self._queue)

    async def submit(self, images: Sequence[Any], kind: str) -> list[Any]:
        """Add images to the queue, wait for their batches, and return one output per image, in the given order.

        If the calling task is canceled, its images are removed from the queue. Raises the exceptions of the model.
        """
        loop = asyncio.get_running_loop()
        added = [_Waiting(image, kind, loop.create_future(), loop.time()) for image in images]
        self._queue.extend(added)
        self._changed.set()
        return await asyncio.gather(*(image.answer for image in added))

    async def run(self) -> None:
        """Label the queued images, until `close` has been called and the queue is empty."""
        loop = asyncio.get_running_loop()
        while batch := await self._next():
            images = [waiting.image for waiting in batch]
            self._observe(len(images))
            try:
                outputs = await loop.run_in_executor(self._device, self._labeler.label, images, batch[0].kind)
            except Exception as error:  # an error of the requests of this batch only
                outputs = [error] * len(batch)
            for waiting, output in zip(batch, outputs, strict=True):
                if waiting.answer.done():  # its request was canceled
                    continue
                if isinstance(output, Exception):
                    waiting.answer.set_exception(output)
                else:
                    waiting.answer.set_result(output)
        self._device.shutdown()

    def close(self) -> None:
        """Let `run` end once the queue is empty."""
        self._closing = True
        self._changed.set()

    async def _next(self) -> list[_Waiting]:
        """Wait for the next batch and return it. Return [] after `close`, once the queue is empty."""
        while True:
            self._queue = [waiting for waiting in self._queue if not waiting.answer.done()]  # without canceled images
            seconds = None
            if self._queue:
                seconds = self._seconds_to_wait()
                if seconds <= 0:
                    return self._take_batch()
            elif self._closing:
                return []
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)

    def _seconds_to_wait(self) -> float:
        """Return the seconds that the oldest image may still wait for more images; at most 0 if it should not wait."""
        oldest = self._queue[0]
        count = sum(waiting.kind == oldest.kind for waiting in self._queue)
        if count >= self._labeler.sizes[oldest.kind][-1] or self._closing or not self._more_expected():
            return 0.0
        return oldest.since + self._wait - asyncio.get_running_loop().time()

    def _take_batch(self) -> list[_Waiting]:
        """Remove and return the next batch: images of the kind of the oldest image, in the order of their arrival."""
        kind = self._queue[0].kind
        same_kind = [waiting for waiting in self._queue if waiting.kind == kind]
        batch = same_kind[: self._labeler.next_batch_size(len(same_kind), kind)]
        taken = set(map(id, batch))
        self._queue = [waiting for waiting in self._queue if id(waiting) not in taken]
        return batch
