"""End a process that hangs, so that its job can be restarted.

If one of several processes makes no progress, the others wait for it forever inside a collective. JAX itself detects a
dead process, but a hanging one shows only by its lack of progress. Training, evaluation and checkpoints send a sign of
life whenever they begin an activity. From its third time on, an activity such as a training step has to end within
45 s, or five times its longest earlier duration if that is more; the first two times, which may compile, have a limit
20 times as high.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict

HUNG = 75  # exit code, EX_TEMPFAIL of sysexits.h: try again
SECONDS = 45.0  # limit of an activity that has been seen twice
STARTUP_FACTOR = 20  # on the limit before that
SLACK_FACTOR = 5  # on the longest earlier duration, not counting the first


class Watchdog:
    """Counts the seconds since the last sign of life; who: the process, for the message."""

    def __init__(self, who: str, seconds: float):
        self.who, self.seconds, self._lock = who, seconds, threading.Lock()
        self._seen: dict[str, list[float]] = defaultdict(list)  # kind -> [the first time, the longest of the others]
        self._kind, self._what, self._quiet, self._limit = "start", "its start", 0.0, seconds * STARTUP_FACTOR

    def sign(self, kind: str, what: str, limit: float | None = None) -> None:
        """Note that the last activity has ended and one of a `kind` begins; `what` completes "no progress since …".

        limit: the seconds that it may take, if known.
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
                limit = max(self.seconds, SLACK_FACTOR * seen[1]) if len(seen) > 1 else self.seconds * STARTUP_FACTOR
            self._limit = limit

    def lived(self, seconds: float) -> str:
        """Count seconds that have passed; return the reason why the process should end, or ""."""
        with self._lock:
            self._quiet += seconds
            if self._quiet <= self._limit:
                return ""
            return (
                f"error: {self.who} has made no progress for {self._quiet:.0f} s since {self._what} and ends itself; "
                "rerun the same command to resume from the last checkpoint (MLMOE_HANG_SECONDS sets the limit per step)"
            )


class _Thread(threading.Thread):
    """Check every second, counting wake-ups and not the clock: a suspended machine does not hang."""

    def __init__(self, dog: Watchdog):
        super().__init__(name="watchdog", daemon=True)
        self.dog, self.stopped = dog, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(1.0):
            if message := self.dog.lived(1.0):
                os.write(2, f"{message}\n".encode())  # the hanging thread may hold the locks of Python's own streams
                os._exit(HUNG)


_thread: _Thread | None = None


def start(who: str, seconds: float) -> None:
    """Watch this process from now on; with 0 seconds, do not."""
    global _thread
    stop()
    if seconds:
        _thread = _Thread(Watchdog(who, seconds))
        _thread.start()


def stop() -> None:
    """Stop watching this process."""
    global _thread
    if _thread is not None:
        _thread.stopped.set()
        _thread.join()
    _thread = None


def sign(kind: str, what: str, limit: float | None = None) -> None:
    """Send a sign of life to the watchdog, if there is one; see `Watchdog.sign`."""
    if _thread is not None:
        _thread.dog.sign(kind, what, limit)
