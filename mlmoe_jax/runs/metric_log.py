"""The metric rows of a training: metrics.jsonl, metrics.csv and trackers."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax

from mlmoe_jax.runs.folder import TABLE, RunFolder
from mlmoe_jax.runs.trackers import Tracker
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import Progress

# Fields of a row that differ between two equal trainings: seconds since the epoch, and figures of `Progress.speed`.
TIMING = ("time", "images_per_second", "data_wait")


class MetricLog:
    """Writer of metrics.jsonl, one row per logged step, and of the same rows to each of `trackers`.

    A row is written after the next step has been dispatched, so that fetching its values does not stall the device.
    metrics.csv has the same rows as a table; it is replaced at every evaluation and at the end. require: raises an
    error for metrics of a step after which the training must not continue.
    """

    def __init__(
        self,
        folder: RunFolder,
        learning_rate: Callable[[int], jax.Array],
        steps_per_epoch: int,
        trackers: Sequence[Tracker] = (),
        require: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ):
        self.folder, self.learning_rate, self.steps_per_epoch = folder, learning_rate, steps_per_epoch
        self.trackers, self.require, self.summary, self._evaluated = trackers, require, "", False
        self._row: dict[str, float] = {}
        self._on_device: dict[str, jax.Array] = {}

    def note(self, step: int, metrics: dict[str, jax.Array], progress: Progress) -> None:
        """Hold a step's metrics, still on the device, as the pending row."""
        # The rate of the last update: the schedule counts updates, so steps that were skipped delay it.
        taken = step - 1 - metrics.get("skipped_steps", 0)
        self._on_device = {**metrics, "learning_rate": self.learning_rate(taken)}
        self._row = {
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "time": round(time.time(), 3),
            **progress.speed(),
        }

    def add(self, values: Mapping[str, float]) -> None:
        """Add evaluation metrics to the pending row."""
        self._row |= values
        self._evaluated = True

    def write(self) -> None:
        """Write the pending row, if any, after `require` has accepted the metrics of its step."""
        if not self._row:
            return
        numbers = {name: float(value) for name, value in jax.device_get(self._on_device).items()}
        self.require(numbers)
        if distributed.is_first():
            row = {**self._row, **numbers}
            self.folder.append_row(row)
            del row["time"]  # trackers have a clock of their own
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
