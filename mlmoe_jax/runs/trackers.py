"""Trackers of metric rows: TensorBoard event files and Weights & Biases."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime import files

TENSORBOARD, WANDB = "tensorboard", "wandb.json"


class Tracker(Protocol):
    """A receiver of metric rows, name -> number, one per logged step, in the order of the steps."""

    def write(self, row: Mapping[str, float]) -> None:
        """Write one row; `row["step"]` is its step."""

    def close(self) -> None:
        """Finish pending writes."""


class EventFiles:
    """TensorBoard's event files, in `tensorboard/` of the run folder.

    Events after `first_step`, which an earlier run wrote and a resumed run writes again, are discarded by a session
    start event. An object store cannot append, so there the file is kept locally and replaced whole.
    """

    def __init__(self, folder: RunFolder, first_step: int):
        # Not at the top: only training needs it. Not its SummaryWriter, whose thread may write late.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._folder, self._event = folder, event_pb2.Event
        self._kept = None if folder.is_local else tempfile.TemporaryDirectory()
        self._where = where = Path(self._kept.name if self._kept else folder.writable_folder(TENSORBOARD))
        with files.full_disk_explained(where):
            where.mkdir(parents=True, exist_ok=True)
            self._file = EventsWriter(str(where / "events"), f".from{first_step}")
        if first_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, row: Mapping[str, float]) -> None:
        """Write one scalar per name; the file is up to date when this returns."""
        event = self._event(wall_time=time.time(), step=int(row["step"]))
        for name, value in row.items():
            if name != "step":
                event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._kept is not None:
            self._kept.cleanup()

    def _write(self, event: Any) -> None:
        with files.full_disk_explained(self._where):
            self._file.write_event(event)
            self._file.flush()
        for path in Path(self._kept.name).iterdir() if self._kept is not None else ():
            self._folder.write_bytes(f"{TENSORBOARD}/{path.name}", path.read_bytes())


class WeightsAndBiases:
    """A run of Weights & Biases, which a resumed training continues; the run folder keeps its id."""

    def __init__(self, folder: RunFolder, project: str, config: ConfigDict):
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise UserError(f"log.wandb={project} needs Weights & Biases: pip install wandb") from error
        known = _known_id(folder)
        name = str(folder).rstrip("/").rpartition("/")[2]
        self._run = wandb.init(project=project, name=name, id=known, resume="allow", config=config.to_dict())
        folder.write_json(WANDB, {"id": self._run.id})

    def write(self, row: Mapping[str, float]) -> None:
        """Log a row under its step."""
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _known_id(folder: RunFolder) -> str | None:
    if not (folder / WANDB).exists():
        return None
    with folder.reading(WANDB):
        return str(folder.read_json(WANDB)["id"])


def open_trackers(folder: RunFolder, config: ConfigDict, first_step: int) -> list[Tracker]:
    """Return the trackers that `config.log` names, for a training that continues after `first_step`.

    Raises UserError if Weights & Biases is named but not installed.
    """
    trackers: list[Tracker] = []
    if config.log.wandb:
        trackers.append(WeightsAndBiases(folder, config.log.wandb, config))
    if config.log.tensorboard:
        trackers.append(EventFiles(folder, first_step))
    return trackers
