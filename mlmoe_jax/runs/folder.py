"""The only writer of a run folder.

A run folder holds all that evaluation, prediction and reports need: `config.json`, `labels.txt`, `label_space.npz`,
`preprocess.json`, `backbone.json`, `thresholds.json`, `metrics.jsonl`, `metrics.csv`, `tensorboard/`, `results.json`,
`per_class.csv`, `cooccurrence.csv`, `scores.npz`, `starts.json`, `checkpoints/`, and `skipped_images.csv` where images
could not be read. Paths go through etils.epath, so that a folder may lie on local disk or in an object store. Files are
replaced whole, by renaming on local disk; an object store replaces objects atomically by itself.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import importlib.util
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from mlmoe_jax.errors import UserError

CONFIG, LABELS, LABEL_SPACE, PREPROCESS = "config.json", "labels.txt", "label_space.npz", "preprocess.json"
BACKBONE, THRESHOLDS, METRICS, RESULTS = "backbone.json", "thresholds.json", "metrics.jsonl", "results.json"
PER_CLASS, SCORES, CHECKPOINTS, FROZEN = "per_class.csv", "scores.npz", "checkpoints", "frozen.safetensors"
SKIPPED, TABLE, COOCCURRENCE, STARTS = "skipped_images.csv", "metrics.csv", "cooccurrence.csv", "starts.json"
SAMPLES, SAMPLE_INDEX, SAMPLE_ARRAYS = "samples", "samples/index.json", "samples/explained.npz"
_LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}  # what etils needs for an object store


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return strict JSON: a number that is not finite, such as the mAP of a split without positives, becomes null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [plain(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, allow_nan=False)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    """Go through all files below a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


class RunFolder:
    """A run folder at a local path or an address such as gs://bucket/run."""

    def __init__(self, path: str | os.PathLike):
        self.path = epath.Path(os.fspath(path))
        self.is_local = "://" not in str(path)

    def __truediv__(self, name: str) -> epath.Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    # ------------------------------------------------------------------------------------------------ opening
    def require_place(self) -> None:
        """Raise UserError where the folder could not be made, before anything is done that takes time."""
        self._require_library()
        if self.is_local:
            path = Path(self.path)
            there = next(place for place in (path, *path.absolute().parents) if place.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                reason = "is not writable" if there.is_dir() else "is a file"
                raise UserError(f"cannot make the run folder {self}: {there} {reason}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder and hold its lock; UserError if another process holds it or it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {self}: {error.strerror or error}") from error
        if not self.is_local:  # object stores have no locks
            yield
            return
        with open(self.path / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"another process is writing to {self}; wait for it or name another folder") from error
            yield

    def require(self, *names: str) -> None:
        """Raise UserError unless this is a run folder with these files."""
        self._require_library()
        if not self.path.is_dir():
            raise UserError(f"there is no run folder {self}; give the --workdir of a finished or stopped training")
        missing = [name for name in names if not (self / name).exists()]
        if missing:
            raise UserError(f"{self} is not the run folder of a training: it has no {missing[0]}")

    def _require_library(self) -> None:
        store = str(self).partition("://")[0]
        library = _LIBRARIES.get(store)
        if not self.is_local and library and importlib.util.find_spec(library) is None:
            raise UserError(f"run folders at {store}:// need the package {library}: pip install {library}")

    # ------------------------------------------------------------------------------------------------ whole files
    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace a file whole: a reader, or a crash, sees the old content or the new."""
        path = self / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_local:
            path.write_bytes(content)
            return
        temporary = f"{path}.tmp"
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def write_text(self, name: str, text: str) -> None:
        """Replace a text file whole."""
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file whole."""
        self.write_text(name, to_json(value, indent=2) + "\n")

    def write_npz(self, name: str, **arrays: np.ndarray) -> None:
        """Replace a compressed npz file whole."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        self.write_bytes(name, buffer.getvalue())

    def write_csv(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Replace a CSV file whole."""
        buffer = io.StringIO()
        table = csv.writer(buffer, lineterminator="\n")
        table.writerows([columns, *rows])
        self.write_text(name, buffer.getvalue())

    def read_text(self, name: str) -> str:
        """Return a text file."""
        return (self / name).read_text()

    def read_json(self, name: str) -> Any:
        """Return a JSON file; UserError if it is damaged."""
        try:
            return json.loads(self.read_text(name))
        except ValueError as error:
            raise UserError(f"{self / name} is damaged: {error}") from error

    def adopt(self, other: RunFolder) -> None:
        """Copy all files of another run folder, its config last: with it this is a run folder, not before."""
        names = [str(path)[len(str(other)) :].lstrip("/") for path in _files(other.path)]
        for name in sorted(set(names) - {".lock"}, key=lambda name: (name == CONFIG, name)):
            self.write_bytes(name, (other / name).read_bytes())

    # ------------------------------------------------------------------------------------------------ metric rows
    def append_row(self, row: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        line = to_json(row) + "\n"
        path = self / METRICS
        if self.is_local:
            with open(path, "a") as file:
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
