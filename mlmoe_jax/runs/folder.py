"""The files of a run folder.

A run folder has everything for evaluation, prediction and reports: `config.json`, `labels.txt`, `label_space.npz`,
`preprocess.json`, `backbone.json`, `thresholds.json`, `metrics.jsonl`, `metrics.csv`, `tensorboard/`, `results.json`,
`per_class.csv`, `cooccurrence.csv`, `scores/`, `starts.json`, `images.npz`, `checkpoints/`, and `skipped_images.csv` if
images could not be read. `mlmoe eval` replaces the results of the splits that it evaluates. A shared model has
`adapter.safetensors` instead of checkpoints. Paths are etils.epath paths, so a folder can be local or in an object
store. Files are replaced atomically: by renaming on local disk, and by the object store itself elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config.table import REQUIRED
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.uploads import Uploads
from mlmoe_jax.runtime import distributed, files
from mlmoe_jax.runtime.files import open_to_append
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import LOCK, Folder
from mlmoe_jax.runtime.text import quantity

CONFIG, LABELS, LABEL_SPACE, PREPROCESS = "config.json", "labels.txt", "label_space.npz", "preprocess.json"
BACKBONE, THRESHOLDS, METRICS, RESULTS = "backbone.json", "thresholds.json", "metrics.jsonl", "results.json"
PER_CLASS, SCORES, CHECKPOINTS, FROZEN = "per_class.csv", "scores", "checkpoints", "frozen.safetensors"
SKIPPED, TABLE, COOCCURRENCE, STARTS = "skipped_images.csv", "metrics.csv", "cooccurrence.csv", "starts.json"
ADAPTER, IMAGES = "adapter.safetensors", "images.npz"
SAMPLES, SAMPLE_INDEX, SAMPLE_ARRAYS = "samples", "samples/index.json", "samples/explained.npz"


class RunFolder(Folder):
    """A run folder at a local path or at a URL such as gs://bucket/run, where `uploads` uploads growing files."""

    kind = "run folder"

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.uploads = Uploads(self.write_bytes)
        self._lines: bytearray | None = None  # metrics.jsonl of a training in an object store

    def require(self, *names: str) -> None:
        """Raise UserError unless this is a run folder that contains the files `names`."""
        self._require_library()
        if not self.path.is_dir():
            raise UserError(f"there is no run folder {self}; give the --workdir of a finished or stopped training")
        missing = [name for name in names if not (self / name).exists()]
        if missing:
            raise UserError(f"{self} is not the run folder of a training: it has no {missing[0]}")

    def require_creatable(self) -> None:
        """Raise UserError as `Folder.require_creatable`, and if a run would replace a list of names of the user."""
        super().require_creatable()
        if self.is_local and (self / LABELS).exists() and not ((self / CONFIG).exists() or (self / LOCK).exists()):
            raise UserError(f"{self} has a {LABELS}, which is of no run and would be replaced; name another folder")

    def require_model(self, *names: str) -> None:
        """Raise UserError unless this is a run folder that contains trained values and the files `names`."""
        self.require(CONFIG, *names, *(() if self.is_shared else (CHECKPOINTS,)))

    @property
    def is_shared(self) -> bool:
        """Whether the folder has the values of a shared model, instead of checkpoints."""
        return (self / ADAPTER).exists()

    def writing_by_first(self) -> contextlib.AbstractContextManager[None]:
        return self.writing() if distributed.is_first() else contextlib.nullcontext()

    def changing_results(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds the lock of the scores, results and thresholds, and waits for the lock first.

        An evaluation may write results while a training ends. The lock of the run folder itself cannot be used for
        this, because the training holds it from its start to its end.
        """
        return self.below(SCORES).writing(wait=True)

    def adopt(self, other: RunFolder) -> None:
        """Copy all files of another run folder into this one.

        The config is copied last, because a folder with a config counts as a run folder.
        """
        for name in sorted(set(other.files()) - {LOCK}, key=lambda name: (name == CONFIG, name)):
            self.write_bytes(name, (other / name).read_bytes())

    def below(self, name: str) -> RunFolder:
        """Return the run folder `name` inside this folder; UserError if `name` is a link to a place outside."""
        return RunFolder(self.inside(name))

    # ------------------------------------------------------------------------------------------------ metric rows
    def append_row(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl; in an object store, which cannot append, `uploads` writes the file later."""
        line = f"{dump_json(row)}\n".encode()
        path = self / METRICS
        if self.is_local:
            with files.disk_errors_explained(path), open_to_append(path) as file:
                file.write(line)
            return
        if self._lines is None:
            self._lines = bytearray(self._stored_lines())
        self._lines += line
        self.uploads.add(METRICS, lambda: bytes(self._lines))
        self.uploads.offer()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, without damaged lines, such as a truncated one; their number is logged."""
        lines = (self._stored_lines() if self._lines is None else self._lines).splitlines()
        rows = [row for row in map(_parse_row, lines) if row is not None]
        if len(rows) < len(lines):
            status(f"{self / METRICS}: {quantity(len(lines) - len(rows), 'damaged line')} left out")
        return rows

    def drop_rows_after(self, step: int) -> None:
        """Remove the rows of steps after `step` from metrics.jsonl. The resumed run will write these rows again."""
        rows = [row for row in self.rows() if row["step"] <= step]
        self.write_text(METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        self._lines = None

    def _stored_lines(self) -> bytes:
        return self.read_bytes(METRICS) if (self / METRICS).exists() else b""


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line of metrics.jsonl; None if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "step" in row else None


def read_config(folder: RunFolder) -> ConfigDict:
    """Return the config of a run folder. Keys that are not stored get their current default.

    Raises UserError if the config is damaged, or lacks the name of the data set, the backbone or the head, for which a
    default would be wrong.
    """
    return configuration.from_json(folder.read_text(CONFIG), str(folder / CONFIG), required=REQUIRED)


def stored_config(folder: RunFolder) -> ConfigDict | None:
    """Return the config of the run in a folder; None unless it has a config, and checkpoints or results."""
    started = (folder / CONFIG).exists() and any((folder / name).exists() for name in (CHECKPOINTS, RESULTS))
    return read_config(folder) if started else None


def training_finished(folder: RunFolder) -> bool:
    """Return whether a training has written its final results. Evaluations before its end do not count."""
    if not (folder / RESULTS).exists():
        return False
    return any(entry["finished"] for entry in folder.read_json(RESULTS).values())


def read_label_space(folder: RunFolder) -> LabelSpace:
    """Return the names, groups and statistics of the labels of a run; UserError if the file is missing or damaged."""
    return folder.read_npz(LABEL_SPACE, LabelSpace.from_arrays, ratio=4)  # it may be a stranger's
