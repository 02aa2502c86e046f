"""The results of a run folder: the metrics and the scores of each evaluated split.

`results.json` maps each split to its entry, which is replaced by a later evaluation of the split:

    {"test": {"scores": "scores/test.npz", "settings": {…}, "metrics": {"mAP": 0.81, …}, "finished": true}, …}

A later evaluation also replaces the rows of the split in `per_class.csv`, `cooccurrence.csv` and `skipped_images.csv`.
Training and `mlmoe eval` write these files with this module, and `stored_run.py` reads them.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import quote

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.split import SkippedImages, Split, name_units
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runs.folder import RESULTS, SCORES, RunFolder
from mlmoe_jax.runtime.formats import read_rows

FALL = "mAP_fall_from_test"  # metric of test_shift: mAP on test minus mAP on test_shift
OUT_OF_FOLD = "out_of_fold"  # the training images with scores of fits without the image (train.fit=logistic)

Results = dict[str, dict[str, float]]  # split -> metric -> value, as fractions


# ------------------------------------------------------------------------------------------------------------- scores
@dataclass(frozen=True)
class SplitScores:
    """The images and labels of one split, with the scores of a model.

    Attributes:
      ids: str[N], the image ids.
      scores: f32[N,K], probabilities; nan if an image could not be read.
      codes: i8[N,K], label codes of `data.label_codes`.
      groups: str[N], the group of each image, see `Split.groups`; None without groups.
      source: the split of the data set; None if the scores were read from a run folder, or if images or labels were
        selected.
    """

    name: str
    ids: np.ndarray
    scores: np.ndarray
    codes: np.ndarray
    groups: np.ndarray | None = None
    source: Split | None = None

    @classmethod
    def of(cls, split: Split, scores: np.ndarray) -> SplitScores:
        """Return the images and labels of a split with their scores, f32[N,K]."""
        groups = None if split.groups is None else np.asarray(split.groups, dtype=str)
        return cls(split.name, np.asarray(split.ids, dtype=str), scores, np.asarray(split.labels), groups, split)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def units(self) -> Sequence[str]:
        """The name of each image's unit: its group, or else its id. A unit is in one fold of a cross-validation."""
        return name_units(self.ids.tolist(), None if self.groups is None else self.groups.tolist())

    @property
    def read(self) -> np.ndarray:
        """Whether an image could be read and therefore has scores, bool[N]."""
        return ~np.isnan(self.scores).any(axis=1)

    @property
    def skipped(self) -> SkippedImages:
        """The images that could not be read. `source` must not be None, because it has the reasons."""
        return SkippedImages(self.source, np.flatnonzero(~self.read).tolist())

    def readable(self) -> SplitScores:
        """Return the split with only the images that have scores."""
        return self if (read := self.read).all() else self.take(read)

    def take(self, rows: np.ndarray) -> SplitScores:
        """Return the split with only the images `rows`: a mask bool[N], or indices i64[n] in the new order."""
        groups = None if self.groups is None else self.groups[rows]
        return SplitScores(self.name, self.ids[rows], self.scores[rows], self.codes[rows], groups)

    def with_labels(self, columns: np.ndarray) -> SplitScores:
        """Return the split with only the labels `columns`: indices i64[k] in the new order."""
        return replace(self, scores=self.scores[:, columns], codes=self.codes[:, columns], source=None)

    def entries(self, difficult: str) -> Entries:
        """Return the scores and the true labels for metrics; ValueError if a valid score is NaN.

        `difficult` is the treatment of difficult labels, as in `data.label_codes.targets`.
        """
        return Entries.of(self.scores, self.codes, difficult)


# ----------------------------------------------------------------------------------------------------------- settings
@dataclass(frozen=True)
class MetricSettings:
    """The settings on which metrics depend. They are stored with the metrics. `of` maps them to config keys."""

    threshold: float
    consistent: bool
    difficult: str
    preset: str

    @classmethod
    def of(cls, config: ConfigDict) -> MetricSettings:
        return cls(
            threshold=config.eval.threshold,
            consistent=config.eval.consistent,
            difficult=config.data.difficult_eval,
            preset=config.metrics.preset,
        )


def metric_scores(scored: SplitScores, tree: LabelTree, settings: MetricSettings) -> SplitScores:
    """Return the scores from which metrics are computed.

    With `settings.consistent` and a tree of labels, `models.consistency` adjusts the raw scores to agree with the tree
    at `settings.threshold`. Otherwise they are the raw scores.
    """
    if not (tree and settings.consistent):
        return scored
    consistency = Consistency.of(tree, settings.threshold, scored.scores.shape[1])
    return replace(scored, scores=consistency(scored.scores))


# ------------------------------------------------------------------------------------------------------------ reading
@dataclass(frozen=True)
class SplitResult:
    """The entry of one split in results.json, with metrics by name, as fractions; nan if a metric is undefined.

    `scores` is the path of the file with the scores, relative to the run folder; "" in a shared model, which has no
    such file. `finished` says whether the training was finished when the split was evaluated. `confusions` is from
    `attribute_metrics.describe_confusions`.
    """

    scores: str
    settings: MetricSettings
    metrics: dict[str, float]
    finished: bool
    confusions: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> SplitResult:
        """Return the result from its JSON object. A damaged object raises an error of any type."""
        metrics = {name: math.nan if value is None else float(value) for name, value in entry["metrics"].items()}
        confusions = {
            name: {"values": list(map(str, one["values"])), "images": np.asarray(one["images"], np.int64).tolist()}
            for name, one in entry.get("confusions", {}).items()
        }
        settings = MetricSettings(**entry["settings"])
        return cls(os.fspath(entry["scores"]), settings, metrics, entry["finished"], confusions)


def read_split_results(folder: RunFolder) -> dict[str, SplitResult]:
    """Return the entries of results.json, split -> entry; {} if it is missing, UserError if it is damaged."""
    if not (folder / RESULTS).exists():
        return {}
    with folder.reading(RESULTS):
        return {split: SplitResult.from_json(entry) for split, entry in folder.read_json(RESULTS).items()}


# ------------------------------------------------------------------------------------------------------------ writing
def write_scores(folder: RunFolder, scored: SplitScores) -> str:
    """Write the scores of a split to the run folder, and return the path of the file relative to the folder."""
    name = f"{SCORES}/{quote(scored.name, safe=' ')}.npz"  # the name of a split may have a slash
    groups = {} if scored.groups is None else {"groups": scored.groups}
    folder.write_npz(name, ids=scored.ids, scores=scored.scores, labels=scored.codes, **groups)
    return name


def write_split_results(folder: RunFolder, entries: Mapping[str, SplitResult], *, keep_others: bool) -> None:
    """Write entries to results.json. The entries of other splits are kept if `keep_others`, or else removed.

    The end of a training replaces all entries. If `test` is written and the entry of `test_shift` is kept, the drop of
    mAP is removed from `test_shift`.
    """
    kept = read_split_results(folder) if keep_others else {}
    if "test" in entries and "test_shift" in kept:
        kept["test_shift"].metrics.pop(FALL, None)  # it refers to the results on test that are replaced
    folder.write_json(RESULTS, {split: asdict(entry) for split, entry in {**kept, **entries}.items()})


def write_rows(
    folder: RunFolder, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], replaced: Iterable[str] | None
) -> None:
    """Write rows to the CSV file `name` of a run folder. The first column is `split`.

    Earlier rows of the splits `replaced` are removed; None: all earlier rows. A file without rows is deleted.
    """
    kept = []
    if replaced is not None and (folder / name).exists():
        splits = set(replaced)
        with folder.reading(name):
            stored = read_rows(io.StringIO(folder.read_text(name), newline=""))
            kept = [[row[column] for column in columns] for row in stored if row["split"] not in splits]
    if kept or rows:
        folder.write_csv(name, list(columns), [*kept, *rows])
    else:
        (folder / name).unlink(missing_ok=True)
