"""A process that hangs ends itself, so that its job can be restarted.

Where one of several processes stops getting on, the others wait for it, for ever, inside a collective. A dead process
is noticed by JAX itself, a hanging one only by its lack of progress. Training, evaluation and checkpoints give a sign
whenever something begins. What has been seen twice, such as a training step, has to come to an end within 45 s, or five
times the longest that it took before; the first and second time, which may compile, have 20 times as long.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict

HUNG = 75  # exit code, EX_TEMPFAIL of sysexits.h: try again
SECONDS = 45.0  # for what has been seen twice
LEAVE = 20  # times as long for what has not
SLOWEST = 5  # times the longest, not counting the first


class Watchdog:
    """Counts the seconds since the last sign of life; who: the process, for the message."""

    def __init__(self, who: str, seconds: float):
        self.who, self.seconds, self._lock = who, seconds, threading.Lock()
        self._seen: dict[str, list[float]] = defaultdict(list)  # kind -> [the first time, the longest of the others]
        self._kind, self._what, self._quiet, self._limit = "start", "its start", 0.0, seconds * LEAVE

    def sign(self, kind: str, what: str, limit: float | None = None) -> None:
        """What went on has ended, and something of a `kind` begins; `what` as in "no progress since …".

        limit: the seconds that it may take, where that is known.
        """
        with self._lock:
            before = self._seen[self._kind]
            if len(before) < 2:
                before.append(self._quiet)
            else:
                before[1] = max(before[1], self._quiet)
            self._kind, self._what, self._quiet = kind, what, 0.0
            if limit is None:
                seen = self._seen[kind]
                limit = max(self.seconds, SLOWEST * seen[1]) if len(seen) > 1 else self.seconds * LEAVE
            self._limit = limit

    def lived(self, seconds: float) -> str:
        """Count seconds that have passed; return why the process should end, or ""."""
        with self._lock:
            self._quiet += seconds
            if self._quiet <= self._limit:
                return ""
            return (
                f"error: {self.who} has made no progress for {self._quiet:.0f} s since {self._what} and ends itself; "
                "the same command goes on from the last checkpoint (MLMOE_HANG_SECONDS sets how long a step may take)"
            )


class _Thread(threading.Thread):
    """Looks every second, and counts by waking up: a machine that was put to sleep is not one that hangs."""

    def __init__(self, dog: Watchdog):
        super().__init__(name="watchdog", daemon=True)
        self.dog, self.stopped = dog, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(1.0):
            if message := self.dog.lived(1.0):
                os.write(2, f"{message}\n".encode())  # the thread that hangs may hold Python's own streams
                os._exit(HUNG)


_thread: _Thread | None = None


def start(who: str, seconds: float) -> None:
    """Watch this process from now on; 0 seconds: do not."""
    global _thread
    stop()
    if seconds:
        _thread = _Thread(Watchdog(who, seconds))
        _thread.start()


def stop() -> None:
    """Watch this process no longer."""
    global _thread
    if _thread is not None:
        _thread.stopped.set()
        _thread.join()
    _thread = None


def sign(kind: str, what: str, limit: float | None = None) -> None:
    """Give the watchdog, if there is one, a sign of life; see `Watchdog.sign`."""
    if _thread is not None:
        _thread.dog.sign(kind, what, limit)
