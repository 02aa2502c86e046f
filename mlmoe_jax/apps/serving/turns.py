"""The order in which the images of requests are decoded."""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class Turns:
    """A lock that `count` tasks can hold. A released place goes to the waiting task with the least `due`."""

    def __init__(self, count: int):
        self._free, self._waiting, self._order = count, [], itertools.count()

    @contextlib.asynccontextmanager
    async def __call__(self, due: float) -> AsyncIterator[None]:
        """Hold the lock while the context is active. `due` is a time in seconds; waiting tasks are sorted by it."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (due, next(self._order), turn))
        self._wake()
        try:
            await turn
            yield
        finally:
            self._free += turn.done() and not turn.cancelled()
            self._wake()

    def _wake(self) -> None:
        while self._free and self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # its task was canceled
                turn.set_result(None)
                self._free -= 1
