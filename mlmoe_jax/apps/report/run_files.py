"""The files of a run folder that only the report reads. The value of a missing file is None or empty.

Shape letters: N images, K labels, S sample images, E entries of a gate.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mlmoe_jax.apps.report.predictions import Predictions, read_thumbnails
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, MetricSettings, SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runs import folder as files
from mlmoe_jax.runs.checkpoint import newest_notes
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.image_record import warn_of_change
from mlmoe_jax.runtime.formats import read_rows
from mlmoe_jax.training.selection import Selection

COST = "cost.json"
_NAMES = ("split", "label", "a", "b")  # columns of CSV files with names, which may be numbers
Row = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """The S sample images of a run with their scores, gates and attention.

    Attributes:
      split: the name of the split of the images.
      grid: the numbers of rows and columns of patches in an image.
      images: name -> content of a JPEG file. If `split` is not the main split, each name begins with `split`.
      codes: i8[S,K], label codes, see data/label_codes.py.
      scores: f64[S,K], probabilities as the run reports them.
      prompts: for each prompt [side, group, expert], where the side is the kind of label groups, CO or DC; None if the
        prompts have no groups.
      entries: name of a gate -> names of its E entries.
      gates: name of a gate -> f16[S,K,E], routing weights; f16[1,K,E] if the gate does not depend on the image.
      attention: kind -> f16[S,Q,N], the attention of Q queries (prompts, labels or the class token) over N patches.
    """

    split: str
    grid: tuple[int, int]
    images: Mapping[str, bytes]
    codes: np.ndarray
    scores: np.ndarray
    prompts: Sequence[Sequence[Any]] | None
    entries: Mapping[str, Sequence[str]]
    gates: Mapping[str, np.ndarray]
    attention: Mapping[str, np.ndarray]


class RunFiles(StoredRun):
    """A run with everything that its report shows.

    `name` is the last part of the path of the folder, and `other` the run to compare with; None = no comparison.
    """

    def __init__(self, folder: RunFolder, other: RunFiles | None = None):
        super().__init__(folder)
        folder.require(files.CONFIG)
        self.name = (folder.path.resolve() if folder.is_local else folder.path).name
        self.other = other

    def command(self, mode: str, *flags: str) -> str:
        """Return the shell command that runs a mode on this folder."""
        return f"mlmoe {shlex.join([mode, f'--workdir={self.folder}', *flags])}"

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl: one dict per logged step; [] if there are none."""
        return self.folder.rows()

    @cached_property
    def cost(self) -> dict[str, Any] | None:
        """The content of cost.json, a result of `count_cost`; None if the file is missing."""
        return self.json(COST)

    @property
    def backbone(self) -> dict[str, Any] | None:
        """The content of backbone.json; None if the file is missing."""
        return self.json(files.BACKBONE)

    @property
    def pairs(self) -> list[Row]:
        """The rows of cooccurrence.csv; [] if there are no pairs of labels that occur together in training."""
        return self.table(files.COOCCURRENCE)

    @cached_property
    def selection(self) -> Selection | None:
        """The selected step of the newest checkpoint, without the parameter values; None without a checkpoint."""
        notes = newest_notes(self.folder)
        return Selection.from_notes({}, notes) if notes else None

    @property
    def names(self) -> Sequence[str]:
        """The names of the labels; empty if labels.txt is missing."""
        return self.labels if self.has(files.LABELS) else ()

    # -------------------------------------------------------------------------------------------------- results
    @property
    def main_settings(self) -> MetricSettings:
        """The settings with which the metrics of the main split were computed."""
        return self.settings(self.main)

    @cached_property
    def per_class(self) -> dict[str, dict[str, Row]]:
        """Split -> label -> row of per_class.csv, without the columns split and label."""
        tables: dict[str, dict[str, Row]] = {}
        for row in self.table(files.PER_CLASS):
            tables.setdefault(row.pop("split"), {})[row.pop("label")] = row
        return tables

    @property
    def has_scores(self) -> bool:
        """Whether the main split has stored scores."""
        return self.main != "" and self.results[self.main].scores != ""

    @cached_property
    def raw(self) -> SplitScores | None:
        """The readable images of the main split with their uncalibrated probabilities; None without stored scores."""
        return self.split(self.main).readable() if self.has_scores else None

    @property
    def scored(self) -> SplitScores | None:
        """The readable main-split images with the scores that its metrics use; None without stored scores."""
        return self.measured_split(self.main).readable() if self.has_scores else None

    @property
    def corrected(self) -> SplitScores | None:
        """The scores of the main split as the run reports them; None without stored scores."""
        return None if self.raw is None else replace(self.raw, scores=self.correct(self.raw.scores))

    @cached_property
    def predictions(self) -> Predictions | None:
        """The predicted labels on the main split; None without stored scores.

        Thresholds that were fitted on the main split are replaced by `eval.threshold`, because the results of fitted
        thresholds on the same images would be too good.
        """
        scored, stored = self.corrected, self.thresholds
        if not scored:
            return None
        limits, origin = self.main_settings.threshold, f"{self.main_settings.threshold:g} for every label"
        if stored is not None and stored.source.get("split") != self.main:
            limits, origin = stored.limits(self.names), files.THRESHOLDS
        consistency = Consistency.of(self.reported_tree, limits, len(self.names))
        scored = replace(scored, scores=consistency(scored.scores))
        return Predictions(scored, self.names, consistency.limits, origin, self.tree.attributes)

    # --------------------------------------------------------------------------------------------------- images
    @cached_property
    def samples(self) -> Samples | None:
        """The sample images; None if the run has none."""
        index = self.json(files.SAMPLE_INDEX)
        if index is None:
            return None
        with self.folder.reading(files.SAMPLE_INDEX):
            arrays, listed = self.folder.read_npz(files.SAMPLE_ARRAYS), index["samples"]
            prefix = "" if self.main in ("", index["split"]) else f"{index['split']}: "
            return Samples(
                split=index["split"],
                grid=tuple(index["grid"]),
                images={prefix + item["id"]: self.folder.read_bytes(item["file"]) for item in listed},
                codes=np.array([item["codes"] for item in listed], np.int8),
                scores=self.correct(np.array([item["scores"] for item in listed], np.float64)),
                prompts=index["prompt_groups"],
                entries=index["entries"],
                gates=_below("gates/", arrays),
                attention=_below("attention/", arrays),
            )

    @cached_property
    def images(self) -> dict[str, bytes]:
        """Name -> JPEG file of the sample images, and of the images with the most confident mistakes."""
        images = dict(self.samples.images) if self.samples else {}
        if self.predictions:
            images |= self._read_from_data([name for name in self.predictions.mistaken if name not in images])
        return images

    def _read_from_data(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Return id -> thumbnail (JPEG file) of images of the main split; {} if the data set cannot be opened.

        Images are left out that the data set lacks, that cannot be read, or whose labels have changed since the
        evaluation.
        """
        data, scored = self.config.data, self.raw
        name = data.train_split if self.main == OUT_OF_FOLD else self.main
        try:
            split = open_split(data, name, classes=self.names, seed=self.config.seed)
        except UserError:
            return {}
        warn_of_change(self.folder, split)
        rows = {str(name): row for row, name in enumerate(split.ids)}
        codes = dict(zip(scored.ids.tolist(), scored.codes, strict=True))
        same = [rows[name] for name in ids if name in rows and np.array_equal(split.labels[rows[name]], codes[name])]
        return read_thumbnails(split, data, same)

    # ------------------------------------------------------------------------------------------------ one file
    def has(self, name: str) -> bool:
        """Return whether the folder has a file."""
        return (self.folder / name).exists()

    def json(self, name: str) -> Any:
        """Return the content of a JSON file; None if it is missing."""
        return self.folder.read_json(name) if self.has(name) else None

    def table(self, name: str) -> list[Row]:
        """Return the rows of a CSV file as dicts from column to cell; [] if the file is missing.

        Cells of the columns _NAMES are texts. All other cells are numbers, and an empty cell is nan.
        """
        if not self.has(name):
            return []
        with self.folder.reading(name):
            rows = read_rows(io.StringIO(self.folder.read_text(name), newline=""))
            return [{key: cell if key in _NAMES else float(cell or "nan") for key, cell in row.items()} for row in rows]


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
