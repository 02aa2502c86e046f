"""What a run folder says about a run: its config, labels, results, scores and thresholds.

Shape letters: N images, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import (
    MetricSettings,
    Results,
    SplitResult,
    SplitScores,
    metric_scores,
    read_split_results,
)
from mlmoe_jax.runs.decisions import Thresholds, stored_thresholds
from mlmoe_jax.runs.folder import CONFIG, LABEL_SPACE, LABELS, RESULTS, RunFolder, read_config, read_label_space
from mlmoe_jax.runtime.array_types import Ints


class StoredRun:
    """A run as its folder has it. Each file is read when it is first needed.

    Every member that needs a file raises UserError if the file is damaged, or is a link to a place outside the folder.
    If the file is missing, the member is None or empty, unless its docstring says that it raises UserError.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._splits: dict[str, SplitScores] = {}

    @cached_property
    def config(self) -> ConfigDict:
        """The config of the run, with defaults for keys that the stored config lacks; UserError if it is missing."""
        self.folder.require(CONFIG)
        return read_config(self.folder)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the K labels in their order; UserError if labels.txt is missing or has other labels."""
        self.folder.require(LABELS)
        names = tuple(self.folder.read_text(LABELS).removesuffix("\n").split("\n"))
        if self.label_space is not None and names != self.label_space.names:
            raise UserError(f"{self.folder / LABELS} has other labels than {LABEL_SPACE}; copy the run folder again")
        return names

    @cached_property
    def label_space(self) -> LabelSpace | None:
        return read_label_space(self.folder) if (self.folder / LABEL_SPACE).exists() else None

    @property
    def tree(self) -> LabelTree:
        """The label tree (implications between labels)."""
        return INDEPENDENT if self.label_space is None else self.label_space.tree

    @cached_property
    def thresholds(self) -> Thresholds | None:
        """The thresholds that `mlmoe predict` uses, and their origin."""
        return stored_thresholds(self.folder)

    # -------------------------------------------------------------------------------------------------- results
    @cached_property
    def results(self) -> dict[str, SplitResult]:
        """Split -> its entry in results.json."""
        return read_split_results(self.folder)

    def require_results(self) -> dict[str, SplitResult]:
        """Return `results`; UserError if there are none."""
        self.folder.require()
        if not (self.folder / RESULTS).exists():
            raise UserError(
                f"{self.folder} has no {RESULTS}; run mlmoe eval --workdir={self.folder}, or let its training finish"
            )
        return self.results

    @property
    def metrics(self) -> Results:
        """Split -> metric -> fraction; UserError without results."""
        return {split: entry.metrics for split, entry in self.require_results().items()}

    @property
    def final_metrics(self) -> Results | None:
        """The metrics of a finished training, split -> metric -> fraction; None if the training has not ended."""
        return self.metrics if any(entry.finished for entry in self.results.values()) else None

    @property
    def main(self) -> str:
        """The main split: the first test split with results, or the first other split; "" without results."""
        tests = self.config.data.test_splits
        return next((name for name in (*tests, *self.results) if name in self.results), "")

    # --------------------------------------------------------------------------------------------------- scores
    @property
    def scored_splits(self) -> tuple[str, ...]:
        """The names of the splits with scores; UserError if there are none."""
        names = tuple(name for name, entry in self.require_results().items() if entry.scores)
        if not names:
            raise UserError(
                f"{self.folder} has results, but no scores of images; run mlmoe eval on the run folder itself"
            )
        return names

    def split(self, name: str) -> SplitScores:
        """Return the images of a split with their raw probabilities; UserError if the run has no scores of it."""
        if name not in self.scored_splits:
            raise UserError(
                f"{self.folder} has scores of {', '.join(self.scored_splits)}, not of {name}; run mlmoe eval "
                f"--workdir={self.folder} --config.data.test_splits={name}"
            )
        if name not in self._splits:
            self._splits[name] = _read_scores(self.folder, self.results[name].scores, name)
        return self._splits[name]

    def settings(self, name: str) -> MetricSettings:
        """Return the settings with which the metrics of a split were computed."""
        return self.results[name].settings

    def measured_split(self, name: str) -> SplitScores:
        """Return the scores from which the metrics of a split are computed, see `metric_scores`."""
        return metric_scores(self.split(name), self.tree, self.settings(name))

    @property
    def categories(self) -> dict[str, Ints]:
        """Category -> the indices of its labels; {} without categories."""
        return {} if self.label_space is None else self.label_space.labels_by_category()

    @property
    def reported_tree(self) -> LabelTree:
        """The label tree with which the reported scores are consistent: attributes alone without `eval.consistent`."""
        return self.tree.consistent(self.config.eval.consistent)

    def correct(self, scores: np.ndarray) -> np.ndarray:
        """Return the reported probabilities for raw ones, f64[N,K]: calibrated, and consistent with the label tree."""
        stored = self.thresholds
        return scores if stored is None else stored.correct(scores, self.labels, self.reported_tree)


def _read_scores(folder: RunFolder, name: str, split: str) -> SplitScores:
    folder.inside(name)  # results.json may be from somebody else
    with folder.reading(name):
        stored = folder.read_npz(name)
        scored = SplitScores(split, stored["ids"], stored["scores"], stored["labels"], stored.get("groups"))
        names: Sequence[np.ndarray] = [scored.ids] if scored.groups is None else [scored.ids, scored.groups]
        if scored.scores.ndim != 2 or scored.scores.shape != scored.codes.shape:
            raise ValueError("it should hold a score and a code of each image and label")
        if any(one.shape != scored.scores.shape[:1] for one in names):
            raise ValueError("it should hold a name of each image")
        return scored
