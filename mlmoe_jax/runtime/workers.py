"""Worker processes: whether this program can start them, how they end, and a pool of them.

A worker process imports the file of the program first. If this file starts workers when it is imported, every worker
would repeat the whole program.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from mlmoe_jax.errors import UserError

GUARD = 'put the code that trains, evaluates or predicts below `if __name__ == "__main__":`'
_IMPORTED = 97  # the exit code of a process that has imported the program
# A process that is forked from this one could deadlock on a lock of one of JAX's threads.
_CONTEXT = multiprocessing.get_context("forkserver")


def require_program() -> None:
    """End this process if it is a worker that is still importing the program. Call it before a long computation.

    Raises SystemExit, whose sentence Python prints without a traceback.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"error: a worker process would run {sys.argv[0]} again; {GUARD}")


@functools.cache
def can_start() -> bool:
    """Return whether workers can be started: False if the program has no file that they can import, as with `python -`.

    A trial process shows whether the program can be imported. Without it, Grain would wait for ever for a worker that
    ends before it has read its arguments. Raises UserError if a worker fails to import the program.
    """
    require_program()
    program = spawn.get_preparation_data("").get("init_main_from_path")
    if program is not None and not os.path.isfile(program):
        logging.getLogger(__name__).warning(
            "images are read by threads, because worker processes cannot import the program %s", program
        )
        return False
    process = multiprocessing.get_context("spawn").Process(target=os._exit, args=(_IMPORTED,), daemon=True)
    process.start()
    process.join()
    if process.exitcode >= 0 and process.exitcode != _IMPORTED:  # it was not killed by a signal
        raise UserError(
            f"a worker process ended while it imported {program or sys.argv[0]} (exit code {process.exitcode}); "
            f"{GUARD}, or set data.workers=0"
        )
    return True


def follow_parent(*_: int) -> None:
    """Make this worker ignore Ctrl-C, which its parent handles, and exit when its parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


class WorkerLost(Exception):
    """The process of a call has ended, or was killed because the call took too long. The message says which."""


class Workers:
    """A pool of `count` processes that call a function, one call at a time in each.

    A process that takes too long or ends is replaced at the next call, and counted in `replaced`.

    Args:
      function: the function, which is pickled. Its module is imported once for all processes. It should not import
        JAX, so that the processes start quickly and are small.
      seconds: the longest time that a call may take; None = no limit.
      most_bytes: the largest size of the data of a process; None = no limit.
    """

    def __init__(
        self, function: Callable[..., Any], count: int, *, seconds: float | None = None, most_bytes: int | None = None
    ):
        _CONTEXT.set_forkserver_preload([function.__module__])
        self._seconds, self.replaced = seconds, 0
        self._workers = [_Worker(function, most_bytes) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "worker")

    def submit(self, *arguments: Any) -> Future:
        """Return the future of `function(*arguments)`. It has the exception of the function, or WorkerLost."""
        return self._threads.submit(self._call, arguments)

    def _call(self, arguments: tuple) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(arguments, self._seconds)
        except WorkerLost:
            self.replaced += 1
            raise
        finally:
            self._idle.put(worker)

    def kill(self) -> None:
        """Kill all processes. Calls in progress end with WorkerLost, and calls that have not begun are canceled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """Wait for the calls in progress, cancel those that have not begun, and end all processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    """A process of `Workers`. If it is lost, the next call starts a new process."""

    def __init__(self, function: Callable[..., Any], most_bytes: int | None):
        self._task = function, most_bytes
        self._start()

    def _start(self) -> None:
        pipe, other = _CONTEXT.Pipe()
        with other:
            process = _CONTEXT.Process(target=_answer, args=(other, *self._task), daemon=True)
            process.start()
        self._pipe, self._process = pipe, process

    def call(self, arguments: tuple, seconds: float | None) -> Any:
        """Return the result of the function, or raise its exception. Raise WorkerLost if the process is lost."""
        if self._pipe.closed:
            self._start()
        try:
            self._pipe.send(arguments)
            if not self._pipe.poll(seconds):
                raise TimeoutError
            result, error = self._pipe.recv()
        except (OSError, EOFError) as lost:  # TimeoutError too is an OSError
            self.close()
            late = isinstance(lost, TimeoutError)
            raise WorkerLost(f"it takes more than {seconds:g} s" if late else "its process has ended") from lost
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        with contextlib.suppress(ValueError):  # it is closed already
            self._process.kill()

    def close(self) -> None:
        if not self._pipe.closed:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process.close()


def _answer(pipe: Connection, function: Callable[..., Any], most_bytes: int | None) -> None:
    """Answer calls until the parent closes the pipe or ends."""
    follow_parent()
    if most_bytes is not None:
        with contextlib.suppress(ValueError, OSError):  # some systems have no such limit
            resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    with contextlib.suppress(EOFError, OSError):
        while True:
            arguments = pipe.recv()
            try:
                answer = function(*arguments), None
            except MemoryError:
                return  # the process that replaces this one has all memory again
            except Exception as error:
                error.add_note(traceback.format_exc())  # which is not pickled
                answer = None, error
            pipe.send(answer)
