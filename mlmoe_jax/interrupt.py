"""Stopping on request, at a moment when everything can be saved."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Turn SIGTERM and the first Ctrl-C into an event, so that the running step ends and is saved."""
    asked = threading.Event()
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
