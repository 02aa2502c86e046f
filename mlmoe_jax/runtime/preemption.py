"""Stop on request, at a point where everything can be saved.

A request is SIGTERM, Ctrl-C, or in a job of several processes a notice of maintenance that JAX's preemption service has
received on any of them.
"""

import contextlib
import itertools
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
def asked_to_stop() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first Ctrl-C into a request, so that the current step finishes and is saved."""
    asked = StopRequest()

    def handle(number: int, frame: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    with _handling(handle, signal.SIGTERM, signal.SIGINT):
        yield asked


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, with KeyboardInterrupt: files are closed and partial ones removed."""

    def handle(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handling(handle, signal.SIGTERM):
        yield


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
