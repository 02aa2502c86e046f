"""The files of a run folder for the report: each is read once, and is None if it is missing.

Shape letters: N images, K labels, S sample images, E entries of a gate.
"""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import (
    PREFIXES,
    SplitScores,
    read_labels,
    read_results,
    read_scores,
    read_settings,
    result_sources,
)
from mlmoe_jax.runs.folder import (
    BACKBONE,
    CONFIG,
    COOCCURRENCE,
    LABEL_SPACE,
    LABELS,
    METRICS,
    PER_CLASS,
    RESULTS,
    SAMPLE_ARRAYS,
    SAMPLE_INDEX,
    SAMPLES,
    SCORES,
    THRESHOLDS,
    EnclosedRunFolder,
    RunFolder,
)
from mlmoe_jax.runs.history import read_starts
from mlmoe_jax.runs.restore import read_config, read_label_space
from mlmoe_jax.runs.thresholds import Thresholds, read_thresholds
from mlmoe_jax.runtime.files import is_file_name
from mlmoe_jax.runtime.formats import read_rows

COST = "cost.json"
NO_SCORES = "scores.npz is written when training ends, or by an evaluation:"


@dataclass(frozen=True)
class Evaluated:
    """An evaluated split; parts whose file is missing are empty or None.

    metrics: name -> fraction, nan if undefined. per_class: one dict per label, with the columns of
    per_class.csv. scores: without unreadable images. prefix: the one of PREFIXES below which the metrics were read.
    """

    name: str
    metrics: Mapping[str, float]
    per_class: Sequence[Mapping[str, str]] = ()
    scores: SplitScores | None = None
    prefix: str = ""


@dataclass(frozen=True)
class Samples:
    """The sample images of a run with their scores, gates and attention.

    images: contents of the files. codes i[S,K]; scores f[S,K]. prompts: [side, group, expert] of each prompt, or None.
    gates: name -> f16[S or 1,K,E]; attention: name -> f16[S,Q,N]; entries: gate -> names of its entries.
    """

    split: str
    grid: tuple[int, int]
    ids: Sequence[str]
    images: Sequence[bytes]
    codes: np.ndarray
    scores: np.ndarray
    prompts: Sequence[Sequence[Any]] | None
    entries: Mapping[str, Sequence[str]]
    gates: Mapping[str, np.ndarray] = field(default_factory=dict)
    attention: Mapping[str, np.ndarray] = field(default_factory=dict)


class RunFiles:
    """The files of a run folder; each is read on first use. name: the last part of its path, see `name_apart`.

    Raises UserError, on first use, if a file is damaged or leads out of the folder.
    """

    def __init__(self, folder: RunFolder):
        self.folder = EnclosedRunFolder(folder.path)
        self.folder.require(CONFIG)
        self.name = self._place[-1]

    @property
    def _place(self) -> tuple[str, ...]:
        path = self.folder.path.resolve() if self.folder.is_local else self.folder.path
        return path.parts

    def name_apart(self, other: RunFiles) -> None:
        """Give both runs the last parts of their paths as `name`, as few as distinguish them."""
        ours, theirs = self._place, other._place
        for count in range(1, max(len(ours), len(theirs)) + 1):
            self.name, other.name = "/".join(ours[-count:]), "/".join(theirs[-count:])
            if self.name != other.name:
                return

    def command(self, mode: str, *flags: str) -> str:
        """Return the command line that runs a mode on this folder, as one types it into a shell."""
        return f"python -m mlmoe_jax.main {shlex.join([mode, f'--workdir={self.folder}', *flags])}"

    @cached_property
    def config(self) -> ConfigDict:
        """The config of the run over the current defaults."""
        return read_config(self.folder)

    def settings(self, prefix: str) -> ConfigDict:
        """Return the config with which the results below a prefix were measured."""
        return read_settings(self.folder, prefix)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return self.folder.rows()

    @cached_property
    def backbone(self) -> dict[str, Any] | None:
        """The contents of backbone.json, with the number of `frozen_parameters`."""
        stored = self._json(BACKBONE)
        with self.folder.reading(BACKBONE):
            if stored is not None and not isinstance(stored["frozen_parameters"], int):
                raise TypeError("frozen_parameters should be a number")
        return stored

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the training, oldest first."""
        return read_starts(self.folder)

    @cached_property
    def cost(self) -> dict[str, Any] | None:
        """The counts of `cost.summarize`."""
        return self._json(COST)

    @cached_property
    def thresholds(self) -> Thresholds | None:
        """The thresholds that prediction uses, and their origin."""
        return read_thresholds(self.folder) if (self.folder / THRESHOLDS).exists() else None

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of the labels; empty if labels.txt is missing."""
        return read_labels(self.folder) if (self.folder / LABELS).exists() else ()

    @cached_property
    def label_space(self) -> LabelSpace | None:
        """The labels with their training statistics."""
        found = read_label_space(self.folder) if (self.folder / LABEL_SPACE).exists() else None
        if found is not None and self.names and len(found.names) != len(self.names):
            raise UserError(
                f"{self.folder / LABEL_SPACE} is damaged: it has {len(found.names):,} labels, but {LABELS} has "
                f"{len(self.names):,}"
            )
        return found

    @cached_property
    def cooccurrence(self) -> list[dict[str, str]] | None:
        """The rows of cooccurrence.csv, of the evaluation after training or else of a later one."""
        for prefix in PREFIXES:
            if (rows := self._table(f"{prefix}{COOCCURRENCE}")) is not None:
                return rows
        return None

    @cached_property
    def splits(self) -> dict[str, Evaluated]:
        """All evaluated splits by name, those of the training first; its results take precedence over --mode=eval."""
        if not self._any(RESULTS):
            return {}
        scores = {name: split.take(split.read) for name, split in self._scores().items()}
        tables: dict[str, list[dict[str, str]]] = {}
        for prefix in PREFIXES:
            found: dict[str, list[dict[str, str]]] = {}
            for row in self._per_class(prefix):
                found.setdefault(row["split"], []).append(row)
            tables = found | tables
        sources = result_sources(self.folder)
        return {
            name: Evaluated(name, metrics, tables.get(name, ()), scores.get(name), sources[name])
            for name, metrics in read_results(self.folder).items()
        }

    @property
    def main_split(self) -> Evaluated | None:
        """The split shown in sections about one split: the first evaluated test split, or else any split."""
        wanted = [name for name in self.config.data.test_splits if name in self.splits]
        return self.splits[wanted[0]] if wanted else next(iter(self.splits.values()), None)

    @cached_property
    def samples(self) -> Samples | None:
        """The sample images."""
        index = self._json(SAMPLE_INDEX)
        if index is None:
            return None
        with self.folder.reading(SAMPLE_INDEX):
            listed, grid, codes = index["samples"], tuple(index["grid"]), [item["codes"] for item in index["samples"]]
            arrays = self._arrays(SAMPLE_ARRAYS) or {}
            found = Samples(
                split=str(index.get("split", "")),
                grid=grid,
                ids=[str(item["id"]) for item in listed],
                images=[self.folder.read_bytes(_sample_file(item["file"])) for item in listed],
                codes=np.array(codes, np.int8),
                scores=np.array([item["scores"] for item in listed], np.float64),
                prompts=index.get("prompt_groups"),
                entries=index.get("entries") or {},
                gates=_below("gates/", arrays),
                attention=_below("attention/", arrays),
            )
            _require_fitting(found, len(self.names))
        with self.folder.reading(SAMPLE_ARRAYS):
            _require_fitting_arrays(found)
        return found

    def written(self, name: str) -> datetime | None:
        """Return the time when a file was last written, None if it is missing."""
        path = self.folder / name
        return datetime.fromtimestamp(path.stat().mtime, UTC) if path.exists() else None

    @property
    def finished(self) -> datetime | None:
        """The time when the results of the main split were written; without results, the metrics of the training."""
        return self.written(METRICS if self.main_split is None else f"{self.main_split.prefix}{RESULTS}")

    # ------------------------------------------------------------------------------------------------ one file
    def _bytes(self, name: str) -> bytes | None:
        return self.folder.read_bytes(name) if (self.folder / name).exists() else None

    def _json(self, name: str) -> Any:
        return self.folder.read_json(name) if (self.folder / name).exists() else None

    def _table(self, name: str) -> list[dict[str, str]] | None:
        content = self._bytes(name)
        if content is None:
            return None
        with self.folder.reading(name):
            return read_rows(io.StringIO(content.decode(), newline=""))

    def _arrays(self, name: str) -> dict[str, np.ndarray] | None:
        return self.folder.read_npz(name) if (self.folder / name).exists() else None

    def _per_class(self, prefix: str) -> list[dict[str, str]]:
        rows = self._table(f"{prefix}{PER_CLASS}") or []
        if rows and not {"split", "label"} <= rows[0].keys():
            raise UserError(f"{self.folder / f'{prefix}{PER_CLASS}'} is damaged: it has no columns split and label")
        with self.folder.reading(f"{prefix}{PER_CLASS}"):
            for row in rows:  # all other cells are figures, or empty
                _ = [float(cell) for name, cell in row.items() if cell and name not in ("split", "label")]
        return rows

    def _any(self, name: str) -> bool:
        return any((self.folder / f"{prefix}{name}").exists() for prefix in PREFIXES)

    def _scores(self) -> dict[str, SplitScores]:
        return read_scores(self.folder) if self._any(SCORES) else {}


def _sample_file(name: Any) -> str:
    """Return a path from samples/index.json; ValueError unless it is that of a file in samples/."""
    parent, _, file = str(name).rpartition("/")
    if parent != SAMPLES or not is_file_name(file):
        raise ValueError(f"it names the image {name!r}, which is not in {SAMPLES}/")
    return name


def _require_fitting(samples: Samples, labels: int) -> None:
    """Raise ValueError or TypeError if the parts of samples/index.json do not fit together, or not the labels."""
    shape = (len(samples.ids), labels or samples.codes.shape[-1])
    if samples.codes.shape != shape or samples.scores.shape != shape or 0 in shape:
        raise ValueError(f"codes and scores should be {shape[0]} rows of {shape[1]} numbers")
    if len(samples.grid) != 2 or not all(isinstance(side, int) and side > 0 for side in samples.grid):
        raise ValueError("grid should be two numbers above 0")
    if samples.prompts is not None and any([type(x) for x in prompt] != [str, int, int] for prompt in samples.prompts):
        raise ValueError("prompt_groups should have the name of a side and the numbers of a group and an expert each")
    if not all(isinstance(name, str) for names in samples.entries.values() for name in names):
        raise TypeError("entries should be lists of names")


def _require_fitting_arrays(samples: Samples) -> None:
    """Raise ValueError if an array of samples/explained.npz does not have the shape that `Samples` gives."""
    (count, labels), tokens = samples.codes.shape, math.prod(samples.grid)
    for name, array in (*samples.gates.items(), *samples.attention.items()):
        if array.ndim != 3 or array.dtype.kind != "f" or 0 in array.shape:
            raise ValueError(f"{name} should have three axes of numbers")
    if unfit := [name for name, of in samples.gates.items() if len(of) not in (1, count) or of.shape[1] != labels]:
        raise ValueError(f"the gate {unfit[0]} does not fit {count} images of {labels} labels")
    if unfit := [name for name, of in samples.attention.items() if (len(of), of.shape[2]) != (count, tokens)]:
        raise ValueError(f"the attention {unfit[0]} does not fit {count} images of {tokens} tokens")
    if len(samples.attention.get("labels", np.zeros((1, labels)))[0]) != labels:
        raise ValueError(f"the attention of labels does not fit {labels} labels")


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
