"""The logs of a training: starts, metric rows, and trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import STARTS, TABLE, RunFolder
from mlmoe_jax.runs.mlflow_log import MLflowRun
from mlmoe_jax.runtime import distributed, files
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.version import __version__

_logger = logging.getLogger(__name__)

# Libraries whose versions are recorded at every start, since results can depend on them.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow")
# Fields of a row that differ between two equal trainings: seconds since the epoch, and `Progress.speed`.
TIMING = ("time", "images_per_second", "data_wait")
TENSORBOARD, WANDB = "tensorboard", "wandb.json"


# ------------------------------------------------------------------------------------------------------------- starts
def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that results depend on."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), "mlmoe_jax": __version__, **libraries}


def record_start(folder: RunFolder, step: int, mesh: Mesh) -> None:
    """Append to `starts.json`: time, first step, versions, devices, processes and mesh. A damaged file is replaced."""
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "versions": versions(),
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
    }
    folder.write_json(STARTS, [*read_starts(folder), start])


def read_starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first; [] without the file, or with a warning if the file is damaged."""
    if not (folder / STARTS).exists():
        return []
    try:
        with folder.reading(STARTS):
            return json.loads(folder.read_text(STARTS))
    except UserError as error:
        _logger.warning(error)  # neither training nor a report depends on it
        return []


# ----------------------------------------------------------------------------------------------------------- trackers
class EventFiles:
    """TensorBoard's event files, in `tensorboard/` of the run folder.

    Events after `first_step`, which an earlier run wrote and a resumed run writes again, are discarded by a session
    start event. In an object store, which cannot append, `RunFolder.uploads` writes the local file.
    """

    def __init__(self, folder: RunFolder, first_step: int):
        # Imported here because only training needs it. The thread of its SummaryWriter may write late.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._event = event_pb2.Event
        self._local = None if folder.is_local else tempfile.TemporaryDirectory()
        self._path = path = Path(self._local.name if self._local else folder.writable_folder(TENSORBOARD))
        with files.disk_errors_explained(path):
            path.mkdir(parents=True, exist_ok=True)
            self._file = EventsWriter(str(path / "events"), f".from{first_step}")
        if not folder.is_local:
            (file,) = path.iterdir()
            folder.uploads.add(f"{TENSORBOARD}/{file.name}", file.read_bytes)
        if first_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, row: Mapping[str, float]) -> None:
        event = self._event(wall_time=time.time(), step=int(row["step"]))
        for name, value in row.items():
            if name != "step":
                event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def close(self) -> None:
        self._file.close()
        if self._local is not None:
            self._local.cleanup()

    def _write(self, event: Any) -> None:
        with files.disk_errors_explained(self._path):
            self._file.write_event(event)
            self._file.flush()


class WeightsAndBiases:
    """A run of Weights & Biases, which a resumed training continues; the run folder keeps its id."""

    def __init__(self, folder: RunFolder, project: str, config: ConfigDict):
        wandb = importlib.import_module("wandb")
        known = folder.read_json(WANDB)["id"] if (folder / WANDB).exists() else None
        name = folder.path.name
        self._run = wandb.init(project=project, name=name, id=known, resume="allow", config=config.to_dict())
        folder.write_json(WANDB, {"id": self._run.id})

    def write(self, row: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


# Receives metric rows, name -> number, one per logged step, in order.
Tracker = EventFiles | WeightsAndBiases | MLflowRun


def require_trackers(config: ConfigDict) -> None:
    """Raise UserError if `config.log` names a tracker whose package is not installed."""
    for name, title in {"wandb": "Weights & Biases", "mlflow": "MLflow"}.items():
        if config.log[name] and importlib.util.find_spec(name) is None:
            raise UserError(f"log.{name}={config.log[name]} needs {title}: pip install {name}")


def open_trackers(folder: RunFolder, config: ConfigDict, first_step: int) -> list[Tracker]:
    """Return the trackers that `config.log` names, for a training that continues after `first_step`.

    Raises UserError if the server of MLflow cannot be used.
    """
    trackers: list[Tracker] = []
    if config.log.mlflow:
        trackers.append(MLflowRun(folder, config.log.mlflow, config))
    if config.log.wandb:
        trackers.append(WeightsAndBiases(folder, config.log.wandb, config))
    if config.log.tensorboard:
        trackers.append(EventFiles(folder, first_step))
    return trackers


# --------------------------------------------------------------------------------------------------------------- rows
class MetricLog:
    """Writes one row per logged step to metrics.jsonl and to each tracker.

    A row is written after the next step has been dispatched, so that fetching its values does not stall the device.
    metrics.csv has the rows as a table. It is replaced at every evaluation and at the end.

    Args:
      learning_rate: the schedule, number of updates -> learning rate.
      trackers: receive each row too.
      require: called with the metrics of a step; raises an error if the training must not continue.
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
            del row["time"]  # trackers record their own times
            for tracker in self.trackers:
                tracker.write(row)
            if self._evaluated:
                self._write_table()
        self.summary = f"loss {numbers['loss']:.4g}, rate {numbers['learning_rate']:.3g}"
        self._row, self._evaluated = {}, False

    def store(self) -> None:
        """Write the pending row, and wait until the run folder has all rows and events."""
        self.write()
        self.folder.uploads.send()

    def close(self) -> None:
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
