"""The rows of a training's metrics: metrics.jsonl, metrics.csv and the trackers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from mlmoe_jax.runs.folder import TABLE, RunFolder
from mlmoe_jax.runs.trackers import Tracker
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import Progress

# Fields of a row that differ between two equal trainings: seconds since the epoch, and `Progress.speed`.
TIMING = ("time", "images_per_second", "data_wait")


class MetricLog:
    """A writer of one row of metrics per logged step, to metrics.jsonl and to each tracker.

    A row is pending until the next step has been dispatched, so that fetching its values does not stall the device.
    metrics.csv contains all rows as a table. It is replaced at every evaluation and at the end.

    Args:
      learning_rate: the schedule, a function from the number of updates to the learning rate.
      require: function that is called with the metrics of a step. It raises an error if the training must not continue.
    """

    def __init__(
        self,
        folder: RunFolder,
        learning_rate: Callable[[int], jax.Array],
        steps_per_epoch: int,
        trackers: Sequence[Tracker] = (),
        require: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ):
        self.folder = folder
        self.learning_rate = learning_rate
        self.steps_per_epoch = steps_per_epoch
        self.trackers = trackers
        self.require = require
        self.summary = ""
        self._row: dict[str, float] = {}
        self._on_device: dict[str, jax.Array] = {}
        self._evaluated = False

    def note(self, step: int, metrics: dict[str, jax.Array], progress: Progress) -> None:
        """Start a new pending row with the metrics of a step, name -> scalar, which the device may still be computing.

        The row also has the speed of the training, from `progress`.
        """
        # The schedule counts updates, so skipped steps delay it.
        updates = step - 1 - metrics.get("skipped_steps", 0)
        self._on_device = {**metrics, "learning_rate": self.learning_rate(updates)}
        self._row = {
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "time": round(time.time(), 3),
            **progress.speed(),
        }

    def add(self, values: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation, name -> value, to the pending row."""
        self._row |= values
        self._evaluated = True

    def write(self) -> None:
        """Write the pending row, if there is one. If `require` raises an error for its metrics, it is not written."""
        if not self._row:
            return
        numbers = {name: float(value) for name, value in jax.device_get(self._on_device).items()}
        self.require(numbers)
        if distributed.is_first():
            row = {**self._row, **numbers}
            self.folder.append_row(row)
            del row["time"]  # trackers record their own times
            for tracker in self.trackers:
                tracker.write(row)
            if self._evaluated:
                self._write_table()
        self.summary = f"loss {numbers['loss']:.4g}, rate {numbers['learning_rate']:.3g}"
        self._row = {}
        self._evaluated = False

    def store(self) -> None:
        """Write the pending row, and wait until all rows are in the run folder, which may be in an object store."""
        self.write()
        self.folder.uploads.send()

    def close(self) -> None:
        """Close the trackers, write metrics.csv and upload files a last time. After an error, the rest still runs."""
        with contextlib.ExitStack() as stack:
            for tracker in self.trackers:
                stack.callback(tracker.close)
            if distributed.is_first():
                self._write_table()
            self.folder.uploads.close()

    def _write_table(self) -> None:
        rows = self.folder.rows()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        self.folder.write_csv(TABLE, columns, [[row.get(name, "") for name in columns] for row in rows])
