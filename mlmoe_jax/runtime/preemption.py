"""Stop on request, at a point where everything can be saved.

A request is SIGTERM, Ctrl-C, or in a job of several processes a notice of maintenance that JAX's preemption service has
received on any of them.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mlmoe_jax.runtime import distributed

_calls = itertools.count()  # JAX compares the numbers of the calls, so they continue from one training to the next


class StopRequest(threading.Event):
    """A request to stop, which may reach only some of the processes, and each of them at a different step."""

    def __init__(self):
        super().__init__()
        self._vote = distributed.Vote()

    def agreed(self) -> bool:
        """Return whether training stops after this step, the same on all processes; each calls it once per step.

        A single process stops after the step in which the request arrived. Several processes stop one step later,
        because the values of all of them are fetched while the device computes the next step.
        """
        if distributed.process()[1] > 1 and _maintenance_noticed():
            self.set()
        return self._vote.any(self.is_set())

    def agreed_at_end(self) -> bool:
        """Return whether a request has reached any process since the last step; all processes wait for one another."""
        return any(distributed.gather(self.is_set()))


def _maintenance_noticed() -> bool:
    """Return whether JAX's preemption service asks all processes to stop at this call; it asks all at the same one."""
    import jax
    from jax.experimental import multihost_utils

    return jax.config.jax_enable_preemption_service and multihost_utils.reached_preemption_sync_point(next(_calls))


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first Ctrl-C into a request, so that the current step finishes and is saved."""
    asked = StopRequest()

    def handle(number: int, frame: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    with _handling(handle, signal.SIGTERM, signal.SIGINT):
        yield asked


# --------------------------------------------------------------------------------------------------- outside the steps
_signals = 0  # received in `interruptible`; 1 = KeyboardInterrupt is due at the next safe point


@contextlib.contextmanager
def interruptible(code: int, patience: float = 2.0) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the block with KeyboardInterrupt: files are closed and partial ones removed.

    The handler of the first signal only records it, because an exception of a handler is lost wherever Python cannot
    propagate it, such as in a callback of the garbage collector; `stop_if_requested` raises it. After `patience`
    seconds, or at a second signal, the handler raises it; after as long again, or at a third one, the process ends with
    the exit code `code`.
    """
    global _signals

    def handle(number: int, frame: Any) -> None:
        global _signals
        _signals += 1
        if _signals == 1:
            signal.setitimer(signal.ITIMER_REAL, patience, patience)
        elif _signals == 2:
            raise KeyboardInterrupt
        else:
            os._exit(code)

    with _handling(handle, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        try:
            yield
            if _signals:  # also if Python ignored what the handler raised
                raise KeyboardInterrupt
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _signals = 0


def stop_if_requested() -> None:
    """Raise KeyboardInterrupt once in the main thread after a signal in `interruptible`; called where this is safe."""
    global _signals
    if _signals == 1 and threading.current_thread() is threading.main_thread():
        _signals = 2
        raise KeyboardInterrupt


@contextlib.contextmanager
def _handling(handle: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handle signals inside the block; without effect outside the main thread, where Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: installed by a C library
