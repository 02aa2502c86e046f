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
    SCORES,
    THRESHOLDS,
    EnclosedRunFolder,
    RunFolder,
)
from mlmoe_jax.runs.history import read_starts
from mlmoe_jax.runs.restore import read_config, read_label_space
from mlmoe_jax.runs.thresholds import Thresholds, read_thresholds
from mlmoe_jax.runtime.formats import read_rows

COST = "cost.json"
NO_SCORES = "scores.npz is written when training ends, or by an evaluation:"
_NAMES = ("split", "label", "a", "b")  # columns of CSV files with names, which may look like numbers
Row = dict[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """An evaluated split; parts whose file is missing are empty or None.

    metrics: name -> fraction, nan if undefined. per_class: label -> its row of per_class.csv without the names.
    scores: without unreadable images. prefix: the one of PREFIXES below which the metrics were read.
    """

    name: str
    metrics: Mapping[str, float]
    per_class: Mapping[str, Row] = field(default_factory=dict)
    scores: SplitScores | None = None
    prefix: str = ""


@dataclass(frozen=True)
class Samples:
    """The sample images of a run with their scores, gates and attention.

    images: contents of the files. codes i8[S,K]; scores f64[S,K]. prompts: [side, group, expert] of each prompt, or
    None. gates: name -> f16[S or 1,K,E]; attention: name -> f16[S,Q,N]; entries: gate -> names of its entries.
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
        self.place = (folder.path.resolve() if folder.is_local else folder.path).parts
        self.name = self.place[-1]

    def name_apart(self, other: RunFiles) -> None:
        """Give both runs the last parts of their paths as `name`, as few as distinguish them."""
        for count in range(1, max(len(self.place), len(other.place)) + 1):
            self.name, other.name = "/".join(self.place[-count:]), "/".join(other.place[-count:])
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
    def rows(self) -> list[Row]:
        """The lines of metrics.jsonl."""
        return self.folder.rows()

    @cached_property
    def frozen_parameters(self) -> int | None:
        """The number of frozen parameters according to backbone.json."""
        stored = self._json(BACKBONE)
        with self.folder.reading(BACKBONE):
            return None if stored is None else int(stored["frozen_parameters"])

    @cached_property
    def starts(self) -> list[Row]:
        """The starts of the training, oldest first."""
        return read_starts(self.folder)

    @cached_property
    def cost(self) -> Row | None:
        """The counts of `cost.summarize`."""
        return self._json(COST)

    @cached_property
    def thresholds(self) -> Thresholds | None:
        """The thresholds that prediction uses, and their origin."""
        return read_thresholds(self.folder) if self._has(THRESHOLDS) else None

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of the labels; empty if labels.txt is missing."""
        return read_labels(self.folder) if self._has(LABELS) else ()

    @cached_property
    def label_space(self) -> LabelSpace | None:
        """The labels with their training statistics."""
        space = read_label_space(self.folder) if self._has(LABEL_SPACE) else None
        if space is not None and self.names and len(space.names) != len(self.names):
            raise UserError(
                f"{self.folder / LABEL_SPACE} is damaged: it has {len(space.names):,} labels, but {LABELS} has "
                f"{len(self.names):,}"
            )
        return space

    @cached_property
    def cooccurrence(self) -> list[Row]:
        """The rows of cooccurrence.csv, of the evaluation after training or else of a later one."""
        return next(filter(None, (self._table(f"{prefix}{COOCCURRENCE}") for prefix in PREFIXES)), [])

    @cached_property
    def splits(self) -> dict[str, Evaluated]:
        """All evaluated splits by name, those of the training first; its results take precedence over --mode=eval."""
        if not any(self._has(f"{prefix}{RESULTS}") for prefix in PREFIXES):
            return {}
        stored = read_scores(self.folder) if any(self._has(f"{prefix}{SCORES}") for prefix in PREFIXES) else {}
        scores = {name: split.take(split.read) for name, split in stored.items()}
        tables: dict[str, dict[str, Row]] = {}
        for name in (f"{prefix}{PER_CLASS}" for prefix in PREFIXES):
            by_split: dict[str, dict[str, Row]] = {}
            with self.folder.reading(name):
                for row in self._table(name):
                    by_split.setdefault(row.pop("split"), {})[row.pop("label")] = row
            tables = by_split | tables
        sources = result_sources(self.folder)
        return {
            name: Evaluated(name, metrics, tables.get(name, {}), scores.get(name), sources[name])
            for name, metrics in read_results(self.folder).items()
        }

    @property
    def main_split(self) -> Evaluated | None:
        """The split shown in sections about one split: the first evaluated test split, or else any split."""
        reported = [name for name in self.config.data.test_splits if name in self.splits]
        return self.splits[reported[0]] if reported else next(iter(self.splits.values()), None)

    @property
    def scored(self) -> SplitScores | None:
        """The scores of the main split; None without any."""
        main = self.main_split
        return main.scores if main is not None and main.scores is not None and len(main.scores) else None

    @cached_property
    def samples(self) -> Samples | None:
        """The sample images."""
        index = self._json(SAMPLE_INDEX)
        if index is None:
            return None
        arrays = self.folder.read_npz(SAMPLE_ARRAYS) if self._has(SAMPLE_ARRAYS) else {}
        with self.folder.reading(SAMPLE_INDEX):
            listed = index["samples"]
            samples = Samples(
                split=str(index.get("split", "")),
                grid=(int(index["grid"][0]), int(index["grid"][1])),
                ids=[str(item["id"]) for item in listed],
                images=[self.folder.read_bytes(str(item["file"])) for item in listed],
                codes=np.array([item["codes"] for item in listed], np.int8),
                scores=np.array([item["scores"] for item in listed], np.float64),
                prompts=index.get("prompt_groups"),
                entries={gate: list(map(str, names)) for gate, names in (index.get("entries") or {}).items()},
                gates=_below("gates/", arrays),
                attention=_below("attention/", arrays),
            )
            shape = (len(samples.ids), len(self.names) or samples.codes.shape[-1])
            if samples.codes.shape != shape or samples.scores.shape != shape or 0 in shape:
                raise ValueError(f"codes and scores should be {shape[0]} rows of {shape[1]} numbers")
        return samples

    @property
    def finished(self) -> datetime | None:
        """The time when the results of the main split were written; without results, the metrics of the training."""
        path = self.folder / (METRICS if self.main_split is None else f"{self.main_split.prefix}{RESULTS}")
        return datetime.fromtimestamp(path.stat().mtime, UTC) if path.exists() else None

    # ------------------------------------------------------------------------------------------------ one file
    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _json(self, name: str) -> Any:
        return self.folder.read_json(name) if self._has(name) else None

    def _table(self, name: str) -> list[Row]:
        if not self._has(name):
            return []
        with self.folder.reading(name):
            rows = read_rows(io.StringIO(self.folder.read_bytes(name).decode(), newline=""))
            return [{key: cell if key in _NAMES else _number(cell) for key, cell in row.items()} for row in rows]


def _number(cell: str | None) -> float | None:
    value = float(cell or "nan")
    return value if math.isfinite(value) else None


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
