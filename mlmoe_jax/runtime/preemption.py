"""Stop on request, at a point where everything can be saved.

A request is SIGTERM, Ctrl-C, or, in a job of several processes, a maintenance notice that JAX's preemption service
received on any process.
"""

import contextlib
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ExtensionFileLoader
from typing import Any, TypeVar

from mlmoe_jax.runtime import distributed

Item = TypeVar("Item")
_calls = itertools.count()  # JAX compares the numbers of the calls, so they continue from one training to the next


class _Leave(KeyboardInterrupt):
    """An interrupt of the wait for a batch."""


class StopRequest(threading.Event):
    """A request to stop. In a job of several processes, it may arrive at some processes only, or at different steps."""

    def __init__(self):
        super().__init__()
        self._vote, self._waits = distributed.Vote(), False

    def handle(self, number: int, frame: Any) -> None:
        """Set the request, and end a wait in `until_set`. A Ctrl-C after the request raises KeyboardInterrupt."""
        if self.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.set()
        if self._waits:
            self._waits = False
            raise _Leave

    def until_set(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items` until a stop is requested, also while this process waits for an item.

        In a job of several processes, all items are yielded, because all processes must stop after one item, see
        `agreed`.
        """
        items, is_alone = iter(items), distributed.process()[1] == 1
        try:
            while True:
                self._waits = is_alone  # before the next line, so that no signal is lost between them
                if is_alone and self.is_set():
                    return
                item = next(items)
                self._waits = False
                yield item
        except (StopIteration, _Leave):
            return
        finally:
            self._waits = False

    def agreed(self) -> bool:
        """Return whether training must stop after this step. Call it once per step; all processes get the same result.

        A single process stops after the step in which the request arrived. Several processes stop at least one step
        later, because their votes are fetched while the device computes the next step.
        """
        if distributed.process()[1] > 1 and _maintenance_noticed():
            self.set()
        return self._vote.any(self.is_set())

    def agreed_at_end(self) -> bool:
        """Return whether any process has received a request, also after the last step. Waits for all processes."""
        return any(distributed.gather(self.is_set()))


def _maintenance_noticed() -> bool:
    """Return whether JAX's preemption service asks the job to stop, in the same call on all processes."""
    import jax
    from jax.experimental import multihost_utils

    return jax.config.jax_enable_preemption_service and multihost_utils.reached_preemption_sync_point(next(_calls))


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Yield a request that SIGTERM or the first Ctrl-C sets, so that the current step can finish and be saved."""
    request = StopRequest()
    with _handling(request.handle, signal.SIGTERM, signal.SIGINT):
        yield request


# --------------------------------------------------------------------------------------------------- outside the steps
_NOTHING, _REQUESTED, _RAISED = range(3)
_stage = _NOTHING  # of `interruptible`; _REQUESTED = KeyboardInterrupt is due at the next safe point
_TICK = 0.05  # seconds between attempts to raise
_EXTENSION_CODE = {getattr(ExtensionFileLoader, name).__code__ for name in ("create_module", "exec_module")}


@contextlib.contextmanager
def interruptible(code: int, patience: float = 2.0) -> Iterator[None]:
    """Convert SIGTERM and Ctrl-C in the block to KeyboardInterrupt.

    Files are then closed, and partial files are removed. At the first signal the handler only records it, because
    Python loses an exception that is raised in some places, such as a callback of the garbage collector.
    `stop_if_requested` then raises KeyboardInterrupt. After `patience` seconds or at a second signal, the handler
    raises KeyboardInterrupt itself. It does not do so while an extension module is being initialized, because that can
    crash. If the process still runs after another `patience` seconds, or at a third signal, it exits with `code`.
    """
    global _stage
    signals, last = 0, math.inf

    def handle(number: int, frame: Any) -> None:
        global _stage
        nonlocal signals, last
        signals += number != signal.SIGALRM
        if signals == 1 and _stage == _NOTHING:
            _stage, last = _REQUESTED, time.monotonic() + 2 * patience
            signal.setitimer(signal.ITIMER_REAL, patience, _TICK)
        elif signals > 2 or time.monotonic() >= last:
            os._exit(code)
        elif _stage == _REQUESTED and _initializes_extension(frame):
            signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
        elif _stage == _REQUESTED:
            _stage = _RAISED
            raise KeyboardInterrupt

    with _handling(handle, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        try:
            yield
            if _stage:  # also if Python ignored the exception of the handler
                raise KeyboardInterrupt
        except Exception as error:
            if _stage == _RAISED:  # a library has replaced the exception of the handler
                raise KeyboardInterrupt from error
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _stage = _NOTHING


def _initializes_extension(frame: Any) -> bool:
    """Return whether `frame` or one of its callers is importing an extension module."""
    while frame is not None and frame.f_code not in _EXTENSION_CODE:
        frame = frame.f_back
    return frame is not None


def stop_if_requested() -> None:
    """Raise KeyboardInterrupt if a signal was recorded. It is raised once, and only in the main thread.

    Call it where KeyboardInterrupt cannot be lost.
    """
    global _stage
    if _stage == _REQUESTED and threading.current_thread() is threading.main_thread():
        _stage = _RAISED
        raise KeyboardInterrupt


@contextlib.contextmanager
def _handling(handle: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handle the signals `numbers` with `handle` during the block.

    Do nothing outside the main thread, because Python does not allow signal handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: installed by a C library
