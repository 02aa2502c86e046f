"""Processes that decode the images of requests. A decoder can only be stopped, and its memory limited, in a process.

This module does not import JAX, so that the processes start quickly and are small.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import multiprocessing
import queue
import resource
import signal
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

from mlmoe_jax.data.images import MAX_DECODED, BadImage

DECODE_SECONDS = 10.0  # the longest time that decoding one image may take
_MEMORY = 3 * MAX_DECODED  # bytes: of decoding, of the decoded array, and of the process itself
_CONTEXT = multiprocessing.get_context("forkserver")  # starts processes in milliseconds, and without JAX's threads


class Readers:
    """Processes that decode images, one image at a time in each.

    Args:
      count: the number of processes.
      seconds: the longest time that a call may take.

    Attributes:
      replaced: the number of processes that were replaced, because they took too long or ended.
    """

    def __init__(self, count: int, seconds: float = DECODE_SECONDS):
        _CONTEXT.set_forkserver_preload(["__main__", "mlmoe_jax.data.image_reader"])
        self._seconds, self.replaced = seconds, 0
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes = {_Process() for _ in range(count)}
        for process in self._processes:
            self._idle.put(process)

    def __call__(self, function: Callable[..., Any], content: bytes, name: str) -> Any:
        """Return `function(content, name)`, called in a process.

        The call waits for an idle process, and blocks the calling thread. `function` and its result are pickled.

        Raises:
          BadImage: `function` raised it, or took too long, or its process ended.
        """
        process = self._idle.get()
        try:
            return process.call(function, content, name, self._seconds)
        except (OSError, EOFError) as error:  # TimeoutError too is an OSError
            self.replaced += 1
            process.close()
            self._processes.discard(process)
            process = _Process()  # if this fails, the next call closes the process again, and starts another one
            self._processes.add(process)
            late = isinstance(error, TimeoutError)
            reason = f"decoding it takes more than {self._seconds:g} s" if late else "its decoder failed"
            raise BadImage(f"cannot read {name} as an image: {reason}; store it again") from error
        finally:
            self._idle.put(process)

    def kill(self) -> None:
        """Kill all processes. Calls in progress raise BadImage."""
        for process in list(self._processes):
            process.kill()

    def close(self) -> None:
        """Kill all processes, and close their files. Call this after the last call has returned."""
        for process in self._processes:
            process.close()


class Turns:
    """A lock that `count` tasks can hold. When one releases it, the waiting task with the least `due` takes it."""

    def __init__(self, count: int):
        self._free, self._waiting, self._order = count, [], itertools.count()

    @contextlib.asynccontextmanager
    async def __call__(self, due: float) -> AsyncIterator[None]:
        """Hold the lock."""
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


class _Process:
    """A process that calls functions."""

    def __init__(self):
        self._pipe, other = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_answer, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def call(self, function: Callable[..., Any], content: bytes, name: str, seconds: float) -> Any:
        """Return `function(content, name)`. Raise TimeoutError after `seconds`, and EOFError if the process ends."""
        self._pipe.send((function, content, name))
        if not self._pipe.poll(seconds):
            raise TimeoutError
        result = self._pipe.recv()
        if isinstance(result, BadImage):
            raise result
        return result

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with contextlib.suppress(ValueError):  # it is closed already
            self.kill()
            self._process.join()
            self._process.close()
        self._pipe.close()


def _answer(pipe: Connection) -> None:
    """Answer calls until the parent closes the pipe or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes
    with contextlib.suppress(ValueError, OSError):  # some systems have no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, content, name = pipe.recv()
            try:
                result = function(content, name)
            except BadImage as error:
                result = error
            pipe.send(result)
