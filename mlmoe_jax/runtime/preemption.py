"""Stopping on request, at a moment when everything can be saved."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from mlmoe_jax.runtime.distributed import Vote


class StopRequest(threading.Event):
    """A request to stop that may reach one process of several, and each of them at another step."""

    def __init__(self):
        super().__init__()
        self._vote = Vote()

    def agreed(self) -> bool:
        """Return whether training stops after this step: once a step on every process, and the same on all of them.

        One process stops with the step in which it was asked. Several stop a step later, for the answers of all are
        fetched while the device is busy with the next step.
        """
        return self._vote.any(self.is_set())


@contextlib.contextmanager
def asked_to_stop() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first Ctrl-C into a request, so that the running step ends and is saved."""
    asked = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number, frame):
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
