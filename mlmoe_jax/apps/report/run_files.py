"""The files of a run folder for the report. Each file is read once, and is None if it is missing.

Shape letters: N images, K labels, S sample images, E entries of a gate.
"""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.results import (
    MetricSettings,
    SplitScores,
    metric_scores,
    read_labels,
    read_scores,
    read_split_results,
)
from mlmoe_jax.runs import folder as files
from mlmoe_jax.runs.folder import RunFolder, read_config, read_label_space
from mlmoe_jax.runs.thresholds import Thresholds, read_thresholds
from mlmoe_jax.runtime.formats import read_rows

COST = "cost.json"
NO_SCORES = "Scores are written when training ends, or by an evaluation:"
_NAMES = ("split", "label", "a", "b")  # columns of CSV files with names, which may be numbers
Row = dict[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """An evaluated split; parts whose file is missing are empty or None.

    Attributes:
      metrics: name -> fraction, nan if undefined.
      per_class: label -> its row of per_class.csv without the names.
      scores: the readable images with scores.
      settings: the settings of the metrics.
    """

    name: str
    metrics: Mapping[str, float]
    per_class: Mapping[str, Row]
    scores: SplitScores | None
    settings: MetricSettings


@dataclass(frozen=True)
class Samples:
    """The sample images of a run with their scores, gates and attention.

    Attributes:
      grid: rows and columns of the patches.
      ids: the names of the images.
      images: contents of the files.
      codes, scores: i8[S,K] and f64[S,K].
      prompts: [side, group, expert] of each prompt, or None.
      entries: gate -> names of its entries.
      gates: name -> f16[S or 1,K,E].
      attention: name -> f16[S,Q,N].
    """

    split: str
    grid: tuple[int, int]
    ids: Sequence[str]
    images: Sequence[bytes]
    codes: np.ndarray
    scores: np.ndarray
    prompts: Sequence[Sequence[Any]] | None
    entries: Mapping[str, Sequence[str]]
    gates: Mapping[str, np.ndarray]
    attention: Mapping[str, np.ndarray]


class RunFiles:
    """The files of a run folder. Each is read on first use. `name` is the last part of its path.

    Raises UserError, on first use, if a file is damaged or leads out of the folder.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.folder.require(files.CONFIG)
        self.name = (folder.path.resolve() if folder.is_local else folder.path).name

    def command(self, mode: str, *flags: str) -> str:
        """Return the shell command that runs a mode on this folder."""
        return f"python -m mlmoe_jax.main {shlex.join([mode, f'--workdir={self.folder}', *flags])}"

    @cached_property
    def config(self) -> ConfigDict:
        """The config of the run over the current defaults."""
        return read_config(self.folder)

    @cached_property
    def rows(self) -> list[Row]:
        return self.folder.rows()

    @cached_property
    def thresholds(self) -> Thresholds | None:
        """The thresholds that prediction uses, and their origin."""
        return read_thresholds(self.folder) if self.has(files.THRESHOLDS) else None

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of the labels; empty if labels.txt is missing."""
        return read_labels(self.folder) if self.has(files.LABELS) else ()

    @cached_property
    def label_space(self) -> LabelSpace | None:
        """The labels with their training statistics."""
        return read_label_space(self.folder) if self.has(files.LABEL_SPACE) else None

    @property
    def tree(self) -> LabelTree:
        """The tree of the labels; empty if there is no label space."""
        return INDEPENDENT if self.label_space is None else self.label_space.tree

    @cached_property
    def splits(self) -> dict[str, Evaluated]:
        """All evaluated splits by name."""
        if not self.has(files.RESULTS):
            return {}
        results = read_split_results(self.folder)
        scored = read_scores(self.folder) if any(entry.scores for entry in results.values()) else {}
        scores = {name: split.readable() for name, split in scored.items()}
        tables: dict[str, dict[str, Row]] = {}
        for row in self.table(files.PER_CLASS):
            tables.setdefault(row.pop("split"), {})[row.pop("label")] = row
        return {
            name: Evaluated(name, entry.metrics, tables.get(name, {}), scores.get(name), entry.settings)
            for name, entry in results.items()
        }

    @property
    def main_split(self) -> Evaluated | None:
        """The split in sections about one split: the first evaluated test split, or else any split."""
        reported = [name for name in self.config.data.test_splits if name in self.splits]
        return self.splits[reported[0]] if reported else next(iter(self.splits.values()), None)

    @property
    def scored(self) -> SplitScores | None:
        """The scores of which the metrics of the main split are computed; None without any."""
        raw = self._raw
        return None if raw is None else metric_scores(raw, self.tree, self.main_split.settings)

    @property
    def _raw(self) -> SplitScores | None:
        main = self.main_split
        return main.scores if main is not None and main.scores is not None and len(main.scores) else None

    @property
    def corrected(self) -> SplitScores | None:
        """The scores of the main split as the run reports them; None without any."""
        raw = self._raw
        return None if raw is None else replace(raw, scores=self.correct(raw.scores))

    def correct(self, scores: np.ndarray) -> np.ndarray:
        """Return the reported scores of raw probabilities."""
        stored = self.thresholds
        return scores if stored is None else stored.correct(scores, self.names, self.reported_tree)

    @property
    def reported_tree(self) -> LabelTree:
        """The tree with which reported scores agree."""
        return self.tree if self.config.eval.consistent else INDEPENDENT

    @cached_property
    def samples(self) -> Samples | None:
        index = self.json(files.SAMPLE_INDEX)
        if index is None:
            return None
        arrays, listed = self.folder.read_npz(files.SAMPLE_ARRAYS), index["samples"]
        return Samples(
            split=index["split"],
            grid=tuple(index["grid"]),
            ids=[item["id"] for item in listed],
            images=[self.folder.read_bytes(item["file"]) for item in listed],
            codes=np.array([item["codes"] for item in listed], np.int8),
            scores=self.correct(np.array([item["scores"] for item in listed], np.float64)),
            prompts=index["prompt_groups"],
            entries=index["entries"],
            gates=_below("gates/", arrays),
            attention=_below("attention/", arrays),
        )

    @property
    def finished(self) -> datetime | None:
        """The time at which the results of the main split, or else the metrics of the training, were written."""
        path = self.folder / (files.METRICS if self.main_split is None else files.RESULTS)
        return datetime.fromtimestamp(path.stat().mtime, UTC) if path.exists() else None

    # ------------------------------------------------------------------------------------------------ one file
    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def json(self, name: str) -> Any:
        return self.folder.read_json(name) if self.has(name) else None

    def table(self, name: str) -> list[Row]:
        """Return the rows of a CSV file of names and numbers; [] if it is missing."""
        if not self.has(name):
            return []
        with self.folder.reading(name):
            rows = read_rows(io.StringIO(self.folder.read_bytes(name).decode(), newline=""))
            return [{key: cell if key in _NAMES else _number(cell) for key, cell in row.items()} for row in rows]


def _number(cell: str | None) -> float | None:
    value = float(cell or "nan")
    return value if math.isfinite(value) else None


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
