"""The only writer of a run folder.

A run folder holds all that evaluation, prediction and reports need: `config.json`, `labels.txt`, `label_space.npz`,
`preprocess.json`, `backbone.json`, `thresholds.json`, `metrics.jsonl`, `metrics.csv`, `tensorboard/`, `results.json`,
`per_class.csv`, `cooccurrence.csv`, `scores.npz`, `starts.json`, `checkpoints/`, and `skipped_images.csv` where images
could not be read. Paths go through etils.epath, so that a folder may lie on local disk or in an object store. Files are
replaced whole, by renaming on local disk; an object store replaces objects atomically by itself.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.storage import Folder, open_to_append, to_json

CONFIG, LABELS, LABEL_SPACE, PREPROCESS = "config.json", "labels.txt", "label_space.npz", "preprocess.json"
BACKBONE, THRESHOLDS, METRICS, RESULTS = "backbone.json", "thresholds.json", "metrics.jsonl", "results.json"
PER_CLASS, SCORES, CHECKPOINTS, FROZEN = "per_class.csv", "scores.npz", "checkpoints", "frozen.safetensors"
SKIPPED, TABLE, COOCCURRENCE, STARTS = "skipped_images.csv", "metrics.csv", "cooccurrence.csv", "starts.json"
SAMPLES, SAMPLE_INDEX, SAMPLE_ARRAYS = "samples", "samples/index.json", "samples/explained.npz"


class RunFolder(Folder):
    """A run folder at a local path or an address such as gs://bucket/run."""

    kind = "run folder"

    def require(self, *names: str) -> None:
        """Raise UserError unless this is a run folder with these files."""
        self._require_library()
        if not self.path.is_dir():
            raise UserError(f"there is no run folder {self}; give the --workdir of a finished or stopped training")
        missing = [name for name in names if not (self / name).exists()]
        if missing:
            raise UserError(f"{self} is not the run folder of a training: it has no {missing[0]}")

    def adopt(self, other: RunFolder) -> None:
        """Copy all files of another run folder, its config last: with it this is a run folder, not before."""
        for name in sorted(set(other.files()) - {".lock"}, key=lambda name: (name == CONFIG, name)):
            self.write_bytes(name, (other / name).read_bytes())

    def below(self, name: str) -> RunFolder:
        """Return the run folder `name` in this one; UserError if it is a link out of this one."""
        return RunFolder(self.inside(name))

    # ------------------------------------------------------------------------------------------------ metric rows
    def append_row(self, row: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        line = to_json(row) + "\n"
        path = self / METRICS
        if self.is_local:
            with open_to_append(path) as file:
                file.write(line)
        else:
            path.write_text((path.read_text() if path.exists() else "") + line)

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; a last line cut off by a crash is left out."""
        path = self / METRICS
        rows = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def drop_rows_after(self, step: int) -> None:
        """Remove the lines of steps beyond `step`, which a resumed run will write again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        self.write_text(METRICS, "".join(json.dumps(row) + "\n" for row in kept))


class EnclosedRunFolder(RunFolder):
    """A run folder of which only files inside are read: what is made of them, such as a report, is passed on."""

    def __truediv__(self, name: str) -> epath.Path:
        return self.inside(name)
