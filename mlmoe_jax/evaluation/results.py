"""Results of evaluations in a run folder: the scores of all images, and the metrics of each split.

Training writes its files to the folder itself, `--mode=eval` to `eval/`. The files of the training take precedence for
a split that has both. Shape letters: N images, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runs.folder import CONFIG, LABELS, RESULTS, SCORES, RunFolder, read_config

if TYPE_CHECKING:
    from mlmoe_jax.data.pipeline import SkippedImages

EVALUATED = "eval/"  # the folder of --mode=eval
FALL = "mAP_fall_from_test"  # metric of test_shift: mAP on test minus mAP on test_shift
OUT_OF_FOLD = "out_of_fold"  # the training images with scores of fits without the image (train.fit=logistic)
PREFIXES = ("", EVALUATED)  # in order of precedence
_CODES = (-1, 0, 1, 2)  # codes of data.split: unknown, negative, positive, difficult

Results = dict[str, dict[str, float]]  # split -> metric -> value, as fractions


@dataclass(frozen=True)
class SplitScores:
    """One split with its scores, computed or read from a run folder.

    Attributes:
      ids: str[N].
      scores: probabilities f32[N,K]; nan if an image could not be read.
      codes: i8[N,K] of data.split.
      groups: str[N], see `Split.groups`; None without groups.
      source: the split of the data set; None for the scores of a run folder, and for a part of the images or labels.
      shares: gate -> f32[N,K], the weight of each label's gate on shared experts (f32[1,K] for static gates); only
        after scoring.
      prefix: the entry of PREFIXES below which the scores were read.
    """

    name: str
    ids: np.ndarray
    scores: np.ndarray
    codes: np.ndarray
    groups: np.ndarray | None = None
    source: Split | None = None
    shares: Mapping[str, np.ndarray] = field(default_factory=dict)
    prefix: str = ""

    @classmethod
    def of(cls, split: Split, scores: np.ndarray, shares: Mapping[str, np.ndarray] | None = None) -> SplitScores:
        """Return a split with its scores f32[N,K]."""
        groups = None if split.groups is None else np.asarray(split.groups, dtype=str)
        return cls(split.name, np.asarray(split.ids, dtype=str), scores, split.labels, groups, split, shares or {})

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def read(self) -> np.ndarray:
        """bool[N], whether an image could be read and therefore has scores."""
        return ~np.isnan(self.scores).any(axis=1)

    @property
    def skipped(self) -> SkippedImages:
        """The images that could not be read; requires `source`, which has the reasons."""
        from mlmoe_jax.data.pipeline import SkippedImages  # here, because who reads results needs no Grain

        return SkippedImages(self.source, np.flatnonzero(~self.read).tolist())

    def readable(self) -> SplitScores:
        """Return the images that have scores."""
        return self if (read := self.read).all() else self.take(read)

    def take(self, rows: np.ndarray) -> SplitScores:
        """Return the images `rows`, bool[N] or i64[n], in this order."""
        groups = None if self.groups is None else self.groups[rows]
        return SplitScores(self.name, self.ids[rows], self.scores[rows], self.codes[rows], groups, prefix=self.prefix)

    def with_labels(self, columns: np.ndarray) -> SplitScores:
        """Return the labels `columns`, i64[k], in this order."""
        return replace(self, scores=self.scores[:, columns], codes=self.codes[:, columns], source=None, shares={})

    def targets(self, difficult: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (label, mask), both f32[N,K]; `difficult` as in `data.label_codes.targets`."""
        return targets(self.codes, difficult)


def metric_scores(scored: SplitScores, tree: LabelTree, config: ConfigDict) -> SplitScores:
    """Return the scores of which metrics are computed: in agreement with a tree at `config.eval.threshold`, or raw."""
    if not (tree and config.eval.consistent):
        return scored
    consistency = Consistency.of(tree, config.eval.threshold, scored.scores.shape[1])
    return replace(scored, scores=consistency(scored.scores))


def read_scores(folder: RunFolder) -> dict[str, SplitScores]:
    """Return all splits that have scores, by name; scores of the training take precedence over --mode=eval.

    Raises UserError if there are none, or if a file is damaged.
    """
    files = [_read_file(folder, prefix) for prefix in _present(folder, SCORES)]
    return files[0] | {split: scores for file in files[1:] for split, scores in file.items() if split not in files[0]}


def read_settings(folder: RunFolder, prefix: str) -> ConfigDict:
    """Return the config of the files below a prefix: the config of the run, or of an evaluation."""
    return read_config(folder, f"{prefix}{CONFIG}")


def require_split(folder: RunFolder, splits: dict[str, SplitScores], name: str) -> SplitScores:
    """Return an entry of `splits`, a result of `read_scores`; UserError if it is missing."""
    if name not in splits:
        raise UserError(
            f"{folder} has scores of {', '.join(splits)}, not of {name}; run --mode=eval --workdir={folder} "
            f"--config.data.test_splits={name}"
        )
    return splits[name]


def read_results(folder: RunFolder) -> Results:
    """Return split -> metric -> fraction, nan if a metric is undefined; precedence as in `read_scores`.

    The fall of mAP from another split is left out if it refers to other results of that split than the returned ones.
    Raises UserError if there are no results, or if a file is damaged.
    """
    results: Results = {}
    for prefix in _present(folder, RESULTS):
        own = _results_in(folder, f"{prefix}{RESULTS}")
        for split, metrics in own.items():
            results.setdefault(split, metrics)
            if FALL in metrics and results.get("test") != own.get("test"):
                results[split] = {name: value for name, value in results[split].items() if name != FALL}
    return results


def hidden_evaluations(folder: RunFolder) -> dict[str, str]:
    """Return split -> a sentence, for splits whose results differ between --mode=eval and the training."""
    both = [f"{prefix}{RESULTS}" for prefix in PREFIXES]
    if not all((folder / name).exists() for name in both):
        return {}
    ours, later = (_results_in(folder, name) for name in both)
    note = "results of the training; eval/ has another evaluation, which is not shown"
    return {split: f"{split}: {note}" for split in ours if split in later and ours[split] != later[split]}


def result_sources(folder: RunFolder) -> dict[str, str]:
    """Return split -> the prefix of the file from which `read_results` takes its metrics."""
    prefixes = reversed(_present(folder, RESULTS))
    return {split: prefix for prefix in prefixes for split in _results_in(folder, f"{prefix}{RESULTS}")}


def training_results(folder: RunFolder) -> Results | None:
    """Return the results of a training, as `read_results` does; None if the training is not finished."""
    return _results_in(folder, RESULTS) if (folder / RESULTS).exists() else None


def _results_in(folder: RunFolder, name: str) -> Results:
    with folder.reading(name):
        stored = folder.read_json(name)
        return {
            split: {key: math.nan if value is None else float(value) for key, value in metrics.items()}
            for split, metrics in stored.items()
        }


def read_labels(folder: RunFolder) -> tuple[str, ...]:
    """Return the names of a run's labels in their order; UserError if the folder has none."""
    folder.require(LABELS)
    return tuple(folder.read_text(LABELS).removesuffix("\n").split("\n"))


def _present(folder: RunFolder, name: str) -> list[str]:
    """Return the prefixes under which a file exists; UserError if there are none."""
    folder.require()
    if not (prefixes := [prefix for prefix in PREFIXES if (folder / f"{prefix}{name}").exists()]):
        raise UserError(f"{folder} has no {name}; run --mode=eval --workdir={folder}, or let its training finish")
    return prefixes


def _read_file(folder: RunFolder, prefix: str) -> dict[str, SplitScores]:
    name, labels = f"{prefix}{SCORES}", len(read_labels(folder))
    with folder.reading(name):
        stored = folder.read_npz(name)
        ids, scores, codes, split_names = (stored[key] for key in ("ids", "scores", "labels", "split"))
        groups = stored["groups"].astype(str) if "groups" in stored else None
        texts = [ids, split_names, *([] if groups is None else [groups])]
        fit = scores.shape == codes.shape == (len(ids), labels) and all(text.shape == (len(ids),) for text in texts)
        # nan is an image that could not be read
        if not fit or not np.isin(codes, _CODES).all() or ((scores < 0) | (scores > 1)).any():
            raise ValueError(f"its arrays do not fit the {labels} labels of {LABELS}, or have impossible values")
        whole = SplitScores("", ids.astype(str), scores.astype(np.float32, copy=False), codes, groups, prefix=prefix)
        splits = dict.fromkeys(split_names.astype(str).tolist())
        return {split: replace(whole.take(split_names == split), name=split) for split in splits}
