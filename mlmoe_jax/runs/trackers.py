"""The trackers of a training: TensorBoard, Weights & Biases, and MLflow (see `mlflow_log`)."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.mlflow_log import MLflowRun
from mlmoe_jax.runtime import files

TENSORBOARD, WANDB = "tensorboard", "wandb.json"


class EventFiles:
    """A writer of TensorBoard event files in the folder `tensorboard/` of a run folder.

    A resumed training continues after `first_step`. Events after `first_step` may exist from before the interruption. A
    session start event makes TensorBoard discard them, and the training writes them again. In an object store, which
    cannot append, `RunFolder.uploads` uploads a local file.
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
    """A run of Weights & Biases. A resumed training continues it by its id, which is stored in the run folder."""

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
    """Return the trackers that the section `log` of the config turns on; UserError if MLflow's server cannot be used.

    The training continues after `first_step`; 0 for a new training.
    """
    trackers: list[Tracker] = []
    if config.log.mlflow:
        trackers.append(MLflowRun(folder, config.log.mlflow, config))
    if config.log.wandb:
        trackers.append(WeightsAndBiases(folder, config.log.wandb, config))
    if config.log.tensorboard:
        trackers.append(EventFiles(folder, first_step))
    return trackers
