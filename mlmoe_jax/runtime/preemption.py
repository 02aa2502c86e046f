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
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from typing import Any

from mlmoe_jax.runtime import distributed

_calls = itertools.count()  # JAX compares the numbers of the calls, so they continue from one training to the next


class StopRequest(threading.Event):
    """A request to stop. It may reach only some processes of a job, and each of them at a different step."""

    def __init__(self):
        super().__init__()
        self._vote = distributed.Vote()

    def agreed(self) -> bool:
        """Return whether training stops after this step. Every process calls it once per step and gets the same answer.

        A single process stops after the step in which the request arrived. Several processes stop one step later,
        because their votes are fetched while the device computes the next step.
        """
        if distributed.process()[1] > 1 and _maintenance_noticed():
            self.set()
        return self._vote.any(self.is_set())

    def agreed_at_end(self) -> bool:
        """Return whether a request has reached any process since the last step; the processes wait for one another."""
        return any(distributed.gather(self.is_set()))


def _maintenance_noticed() -> bool:
    """Return whether JAX's preemption service stops the job at this call, which is the same call on all processes."""
    import jax
    from jax.experimental import multihost_utils

    return jax.config.jax_enable_preemption_service and multihost_utils.reached_preemption_sync_point(next(_calls))


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first Ctrl-C into a request, so that the current step finishes and is saved."""
    request = StopRequest()

    def handle(number: int, frame: Any) -> None:
        if request.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.set()

    with _handling(handle, signal.SIGTERM, signal.SIGINT):
        yield request


# --------------------------------------------------------------------------------------------------- outside the steps
_NOTHING, _REQUESTED, _RAISED = range(3)
_stage = _NOTHING  # of `interruptible`; _REQUESTED = KeyboardInterrupt is due at the next safe point
_TICK = 0.05  # seconds between attempts to raise
_EXTENSION_CODE = {getattr(ExtensionFileLoader, name).__code__ for name in ("create_module", "exec_module")}


@contextlib.contextmanager
def interruptible(code: int, patience: float = 2.0) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the block with KeyboardInterrupt: files are closed and partial ones removed.

    The handler of the first signal only records the signal, because Python loses an exception that is raised in some
    places, such as a callback of the garbage collector. `stop_if_requested` then raises KeyboardInterrupt. After
    `patience` seconds, or at a second signal, the handler raises it itself, but not in the initialization of an
    extension module, which can crash.

    Args:
      code: the exit code of the process if it still runs after another `patience` seconds, or at a third signal.
      patience: seconds.
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
    """Return whether an extension module is imported in a frame or in a caller of it."""
    while frame is not None and frame.f_code not in _EXTENSION_CODE:
        frame = frame.f_back
    return frame is not None


def stop_if_requested() -> None:
    """Raise KeyboardInterrupt in the main thread, once, if a signal was recorded; called where this is safe."""
    global _stage
    if _stage == _REQUESTED and threading.current_thread() is threading.main_thread():
        _stage = _RAISED
        raise KeyboardInterrupt


@contextlib.contextmanager
def _handling(handle: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handle signals during the block. Does nothing outside the main thread, where Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: installed by a C library
