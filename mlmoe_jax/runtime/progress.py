"""Progress on the terminal: bars, lines and messages.

All of it goes to stderr: bars on a terminal, and lines through the logger of this module, which
`logging.getLogger("mlmoe_jax").setLevel("WARNING")` silences. Warnings are no progress: each module logs its own, and
the program that uses the package decides what becomes of them.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.preemption import stop_if_requested

# Seconds between lines if stderr is not a terminal, during the first minute and afterwards.
EARLY_LINE_SECONDS, LINE_SECONDS = 5.0, 15.0
SPEED_STEPS = 100  # number of steps over which the speed is measured


class AboveBars(logging.Handler):
    """A logging handler that writes each line to stderr above the active progress bars, in the first process only."""

    def emit(self, record: logging.LogRecord) -> None:
        if distributed.is_first():
            tqdm.write(self.format(record), file=sys.stderr)


_LOGGER, _PACKAGE = logging.getLogger(__name__), logging.getLogger("mlmoe_jax")
if not (_LOGGER.handlers or _PACKAGE.handlers):  # a program that uses the package may have set up its own handlers
    _LOGGER.addHandler(AboveBars())
    _LOGGER.propagate = False
if _PACKAGE.level == logging.NOTSET:
    _PACKAGE.setLevel(logging.INFO)


class Progress:
    """The progress of a loop: a bar on a terminal, or lines if stderr is not a terminal.

    A line is written every 5 s during the first minute, and every 15 s later. The speed, the remaining time and the
    share of waiting are measured over the last SPEED_STEPS steps. Pauses and the first step, which compiles, are
    excluded.

    Args:
      task: name of the loop, such as "train".
      total: number of the last step.
      start: number of steps that were completed before this process started.
    """

    def __init__(self, task: str, total: int, images_per_step: int, *, start: int = 0):
        self.task, self.total, self.images_per_step = task, total, images_per_step
        self.step, self.note, self.waited = start, "", 0.0
        self.started = self.last_line = time.perf_counter()
        self._paused = 0.0  # seconds
        self._steps: deque[tuple[float, float]] = deque(maxlen=SPEED_STEPS + 1)  # time and `waited` after each step
        terminal = sys.stderr.isatty() and distributed.is_first()
        self.bar = tqdm(total=total, initial=start, desc=task, unit="step", leave=False, disable=not terminal)
        self._silence = threading.Timer(
            EARLY_LINE_SECONDS, status, (f"{task}: compiling and reading the first batches",)
        )
        self._silence.daemon = True
        self._silence.start()
        heartbeat()

    def waiting(self, batches: Iterable) -> Iterator:
        """Yield the items of `batches`, and measure the time spent waiting for each item."""
        try:
            began = time.perf_counter()
            for batch in batches:
                self.waited += time.perf_counter() - began
                yield batch
                began = time.perf_counter()
        finally:
            self._silence.cancel()  # also after an error

    def advance(self, note: str = "") -> None:
        """Record that one step is complete. `note` is shown after the speed; "" keeps the previous note."""
        self._silence.cancel()
        self.step += 1
        now = time.perf_counter()
        self._steps.append((now - self._paused, self.waited))
        heartbeat()
        self.note = note or self.note
        self.bar.set_postfix_str(f"{self.speed_text()} {self.note}".strip(), refresh=False)
        self.bar.update()
        pause = EARLY_LINE_SECONDS if now - self.started < 60 else LINE_SECONDS
        if self.bar.disable and now - self.last_line > pause:
            self.last_line = now
            self._line()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the measured speed, for example an evaluation."""
        began = time.perf_counter()
        yield
        heartbeat()
        self._paused += time.perf_counter() - began

    def speed(self) -> dict[str, float]:
        """Return `images_per_second` and `data_wait`, the fraction of time spent waiting; {} before two steps."""
        if len(self._steps) < 2:
            return {}
        seconds = max(1e-9, self._steps[-1][0] - self._steps[0][0])
        images = (len(self._steps) - 1) * self.images_per_step
        return {"images_per_second": images / seconds, "data_wait": (self._steps[-1][1] - self._steps[0][1]) / seconds}

    def speed_text(self) -> str:
        """Return the speed and the share of waiting as text; "" before two steps."""
        if not (speed := self.speed()):
            return ""
        images = speed["images_per_second"]
        return f"{images:,.{0 if images >= 10 else 1}f} images/s, {100 * speed['data_wait']:.0f} % data wait"

    def close(self) -> None:
        self._silence.cancel()
        self.bar.close()
        heartbeat()

    def _line(self) -> None:
        parts = [f"{self.task} {self.step}/{self.total}"]
        if speed := self.speed():
            seconds = max(0, self.total - self.step) * self.images_per_step / speed["images_per_second"]
            parts += [self.speed_text(), f"{timedelta(seconds=round(seconds))} left"]
        status(f"{', '.join(parts)} {self.note}".rstrip())


class DownloadBar(tqdm):
    """A progress bar of a download in bytes, shown on a terminal only. Every update calls `heartbeat`."""

    def __init__(self, **options: Any):
        options.pop("name", None)  # an argument of the bars of huggingface_hub 1
        super().__init__(**options | {"leave": False, "disable": not sys.stderr.isatty()})

    def update(self, n: float | None = 1) -> bool | None:
        heartbeat()
        return super().update(n)


def heartbeat() -> None:
    """Touch the file $MLMOE_HEARTBEAT, which `launch/supervise.sh` watches; KeyboardInterrupt if asked to stop."""
    stop_if_requested()
    path = os.environ.get("MLMOE_HEARTBEAT")
    if path and os.path.exists(path):  # only on the machine of the supervisor
        os.utime(path)


def megabytes(count: float) -> str:
    """Return a number of bytes as text in MB."""
    return f"{count / 1e6:.1f} MB"


def status(text: str) -> None:
    """Log a message in the first process, by default to stderr; KeyboardInterrupt if the command was asked to stop."""
    stop_if_requested()
    if distributed.is_first():
        _LOGGER.info(text)
