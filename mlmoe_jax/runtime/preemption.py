"""Stop on request, at a point where everything can be saved."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from mlmoe_jax.runtime.distributed import Vote


class StopRequest(threading.Event):
    """A request to stop, which may reach only some of the processes, and each of them at a different step."""

    def __init__(self):
        super().__init__()
        self._vote = Vote()

    def agreed(self) -> bool:
        """Return whether training stops after this step, the same on all processes; each calls it once per step.

        A single process stops after the step in which the request arrived. Several processes stop one step later,
        because the values of all of them are fetched while the device computes the next step.
        """
        return self._vote.any(self.is_set())


@contextlib.contextmanager
def asked_to_stop() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first Ctrl-C into a request, so that the current step finishes and is saved."""
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
