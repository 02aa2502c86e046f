"""What a person sees while something runs, and the rows of metrics.jsonl."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import jax
from tqdm import tqdm

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import TABLE, RunFolder
from mlmoe_jax.runs.trackers import Tracker
from mlmoe_jax.runtime import distributed, watchdog

LINE_EVERY = 15.0  # seconds between lines where there is no terminal


class Progress:
    """A bar on a terminal; where stderr is a file, a line now and then (a bar would be one endless line there)."""

    def __init__(self, what: str, total: int, images_per_step: int, *, first: int = 0):
        self.what, self.total, self.images_per_step = what, total, images_per_step
        self.first = self.done = first
        self.note = ""
        self.started = self.last_line = time.perf_counter()
        self.waited = 0.0
        terminal = sys.stderr.isatty() and distributed.is_first()
        self.bar = tqdm(total=total, initial=first, desc=what, unit="step", leave=False, disable=not terminal)
        self.lines = not terminal
        watchdog.sign(f"begin to {what}", f"it began to {what}")

    def waiting(self, batches: Iterable) -> Iterator:
        """Pass batches on and measure how long each made the caller wait."""
        batches = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - asked
            yield batch

    def advance(self, note: str = "") -> None:
        """Count one step; `note` is shown behind the figures."""
        self.done += 1
        watchdog.sign(self.what, f"step {self.done} of {self.total}, {self.what}")
        self.note = note or self.note
        self.bar.set_postfix_str(f"{self.figures()} {self.note}".strip(), refresh=False)
        self.bar.update()
        now = time.perf_counter()
        if self.lines and now - self.last_line > LINE_EVERY:
            self.last_line = now
            self._line(now)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside, such as an evaluation, out of the figures."""
        began = time.perf_counter()
        yield
        watchdog.sign(f"go on to {self.what}", f"it went on to {self.what} after step {self.done}")
        self.started += time.perf_counter() - began

    @property
    def images_per_second(self) -> float:
        """Images a second since the start or resume."""
        return (self.done - self.first) * self.images_per_step / max(1e-9, time.perf_counter() - self.started)

    @property
    def data_wait(self) -> float:
        """The share of the time that was spent waiting for data, 0…1."""
        return self.waited / max(1e-9, time.perf_counter() - self.started)

    def figures(self) -> str:
        """Return images/s and the data-wait share as text."""
        return f"{self.images_per_second:.0f} images/s, {100 * self.data_wait:.0f} % data wait"

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()
        watchdog.sign(f"end of {self.what}", f"the end of {self.what}")

    def _line(self, now: float) -> None:
        rate = (now - self.started) / max(1, self.done - self.first)
        left = timedelta(seconds=round(rate * (self.total - self.done)))
        say(f"{self.what} {self.done}/{self.total}, {self.figures()}, {left} left {self.note}".rstrip())


class Meter:
    """The progress of a download in bytes: a bar on a terminal; where stderr is a file, a line now and then."""

    def __init__(self, name: str, first: int, length: int):
        self.name, self.first, self.done, self.length = name, first, first, length
        self.started = self.last_line = time.perf_counter()
        self.lines = not sys.stderr.isatty()
        self.bar = tqdm(
            total=length or None,
            initial=first,
            desc=name,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=self.lines,
        )

    def add(self, count: int) -> None:
        """Count bytes that have arrived."""
        self.done += count
        watchdog.sign("download", f"{megabytes(self.done)} of {self.name} had come")
        self.bar.update(count)
        now = time.perf_counter()
        if self.lines and now - self.last_line > LINE_EVERY:
            self.last_line = now
            rate = (self.done - self.first) / max(1e-9, now - self.started)
            left = timedelta(seconds=round((self.length - self.done) / rate)) if self.length else "? s"
            of_all = f" of {megabytes(self.length)}" if self.length else ""
            say(f"{self.name} {megabytes(self.done)}{of_all}, {megabytes(rate)}/s, {left} left")

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()


def megabytes(count: float) -> str:
    """Return a number of bytes in MB as text."""
    return f"{count / 1e6:.1f} MB"


class MetricLog:
    """The rows of metrics.jsonl, one a logged step, and the same rows for every one of `trackers`.

    A row waits until the next step is under way, so that fetching its numbers does not hold the device up.
    metrics.csv has the same rows as a table; it is written whole, with every evaluation and at the end.
    """

    def __init__(
        self,
        folder: RunFolder,
        learning_rate: Callable[[int], jax.Array],
        steps_per_epoch: int,
        trackers: Sequence[Tracker] = (),
    ):
        self.folder, self.learning_rate, self.steps_per_epoch = folder, learning_rate, steps_per_epoch
        self.trackers, self.summary, self._evaluated = trackers, "", False
        self._row: dict[str, float] = {}
        self._on_device: dict[str, jax.Array] = {}

    def note(self, step: int, metrics: dict[str, jax.Array], progress: Progress) -> None:
        """Remember a step's metrics, still on the device."""
        self._on_device = {**metrics, "learning_rate": self.learning_rate(step - 1)}
        self._row = {
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "images_per_second": progress.images_per_second,
            "data_wait": progress.data_wait,
        }

    def add(self, values: Mapping[str, float]) -> None:
        """Add evaluation metrics to the waiting row."""
        self._row |= values
        self._evaluated = True

    def write(self) -> None:
        """Write the waiting row, if there is one; UserError where the loss is not finite."""
        if not self._row:
            return
        step = self._row["step"]
        numbers = {name: float(value) for name, value in jax.device_get(self._on_device).items()}
        require_finite(step, numbers["loss"])
        if distributed.is_first():
            row = {**self._row, **numbers}
            self.folder.append_row(row)
            for tracker in self.trackers:
                tracker.write(row)
            if self._evaluated:
                self._write_table()
        self.summary = f"loss {numbers['loss']:.4g}, rate {numbers['learning_rate']:.3g}"
        self._row, self._evaluated = {}, False

    def close(self) -> None:
        """Finish the table and the trackers."""
        if distributed.is_first():
            self._write_table()
        for tracker in self.trackers:
            tracker.close()

    def _write_table(self) -> None:
        rows = self.folder.rows()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        self.folder.write_csv(TABLE, columns, [[row.get(name, "") for name in columns] for row in rows])


def require_finite(step: int, loss: float) -> None:
    """Raise UserError where the loss of a step is not a finite number."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step}; lower config.optim.learning_rate and start in a new --workdir (the "
            "checkpoints before it are kept)"
        )


def say(text: str) -> None:
    """Print a line for people, on stderr, so that stdout carries results only; the first process speaks for all."""
    if distributed.is_first():
        tqdm.write(text, file=sys.stderr)
