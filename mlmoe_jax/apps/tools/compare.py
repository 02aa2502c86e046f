"""Compare two runs on the images for which both have scores.

Shape letters: N images, K labels, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.bootstrap import CHUNK, WeightedMetrics, draw, percentile_interval
from mlmoe_jax.evaluation.results import SplitScores, read_labels, read_scores, read_settings, require_split
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.runs.restore import read_config
from mlmoe_jax.runtime.progress import Progress

RESAMPLES, SEED = 1000, 0
LISTED = 100  # images per split that changed most
_MOVES = 3  # labels per listed image


@dataclass(frozen=True)
class Change:
    """A metric of both runs as fractions, and the 95 % interval of its difference b − a over resampled images."""

    a: float
    b: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """b − a."""
        return self.b - self.a

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Move:
    """The probabilities of one label of one image, and whether the label is present."""

    label: str
    positive: bool
    a: float
    b: float

    @property
    def gain(self) -> float:
        """How much closer the second run is to the truth, −1…1."""
        return self.b - self.a if self.positive else self.a - self.b


@dataclass(frozen=True)
class ChangedImage:
    """An image whose probabilities differ between the runs.

    change: mean |b − a| of the probabilities of its known labels. a, b: mean probability of the truth, present or
    absent, over the known labels. labels: those present. moves: the labels that changed most.
    """

    id: str
    change: float
    a: float
    b: float
    labels: tuple[str, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class ComparedImages:
    """The number of images with scores in both runs, in only one run, and in both but unreadable in one of them."""

    images: int
    only_a: int
    only_b: int
    unread: int


@dataclass(frozen=True)
class Comparison:
    """Two runs on one split.

    metrics: by name. ap: the average precision of each label. positives: images of each label.
    changed: the images that changed most, the largest change first.
    """

    a: str
    b: str
    split: str
    counts: ComparedImages
    metrics: dict[str, Change]
    ap: dict[str, Change]
    positives: dict[str, int]
    changed: tuple[ChangedImage, ...]
    resamples: int
    seed: int


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison, from its folder. configs: prefix of scores -> config with which they were measured."""

    folder: RunFolder
    labels: tuple[str, ...]
    splits: dict[str, SplitScores]
    configs: dict[str, ConfigDict]
    reported: tuple[str, ...]

    @classmethod
    def of(cls, folder: RunFolder) -> ComparedRun:
        """Read a run folder; UserError if it has no scores."""
        folder.require(CONFIG)
        splits, labels = read_scores(folder), read_labels(folder)
        configs = {prefix: read_settings(folder, prefix) for prefix in {of.prefix for of in splits.values()}}
        return cls(folder, labels, splits, configs, read_config(folder).data.test_splits)

    def difficult(self, split: str) -> str:
        """Return how difficult labels of a split counted when it was measured."""
        return self.configs[self.splits[split].prefix].data.difficult_eval

    def threshold(self, split: str) -> float:
        """Return the threshold at which a split was measured."""
        return self.configs[self.splits[split].prefix].eval.threshold


@dataclass(frozen=True)
class MatchedImages:
    """The images of a split that both runs have scored, in the order of the first run, with the labels of the first.

    one, other: the scores of the first and of the second run. label, mask: f32[N,K], with the first run's treatment of
    difficult labels.
    """

    one: SplitScores
    other: SplitScores
    label: np.ndarray
    mask: np.ndarray
    counts: ComparedImages


# ---------------------------------------------------------------------------------------------------- the comparison
def compare_runs(
    a: RunFolder, b: RunFolder, *, split: str = "", resamples: int = RESAMPLES, seed: int = SEED
) -> Comparison:
    """Compare two runs on one split, by default the first reported one of `a` for which both have scores.

    The threshold of predictions and the treatment of difficult labels are those of run `a` for both. Raises UserError
    if a run has no scores, if the labels or the truth differ, or if no image is in both.
    """
    first, second = ComparedRun.of(a), ComparedRun.of(b)
    return compare_split(first, second, split or shared_splits(first, second)[0], resamples=resamples, seed=seed)


def shared_splits(first: ComparedRun, second: ComparedRun) -> list[str]:
    """Return the splits for which both runs have scores, starting with those that the first run reports."""
    shared = [name for name in dict.fromkeys((*first.reported, *first.splits)) if name in first.splits]
    shared = [name for name in shared if name in second.splits]
    if not shared:
        raise UserError(
            f"{first.folder} has scores of {', '.join(first.splits)} and {second.folder} of "
            f"{', '.join(second.splits)}; run --mode=eval for both on the same --config.data.test_splits"
        )
    return shared


def compare_split(
    first: ComparedRun, second: ComparedRun, split: str, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Comparison:
    """Compare two runs on a split, see `compare_runs`."""
    return compare_matched(first, second, match_images(first, second, split), resamples=resamples, seed=seed)


def match_images(first: ComparedRun, second: ComparedRun, split: str) -> MatchedImages:
    """Return the images of a split with scores in both runs; UserError as in `compare_runs`."""
    in_first, in_second = (require_split(run.folder, run.splits, split) for run in (first, second))
    in_second = in_second.with_labels(_columns(first, second))
    rows_first, rows_second = _shared_images(first, second, in_first, in_second)
    only_first, only_second = len(in_first) - len(rows_first), len(in_second) - len(rows_second)
    in_first, in_second = in_first.take(rows_first), in_second.take(rows_second)
    _require_same_truth(first, second, in_first, in_second)
    read = in_first.read & in_second.read
    if not read.any():
        raise UserError(f"none of the {len(read):,} common images of {split} has scores in both runs")
    one, other = in_first.take(read), in_second.take(read)
    counts = ComparedImages(len(one), only_first, only_second, unread=int((~read).sum()))
    return MatchedImages(one, other, *one.targets(first.difficult(split)), counts)


def compare_matched(
    first: ComparedRun, second: ComparedRun, images: MatchedImages, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Comparison:
    """Compare two runs on matched images, see `compare_runs`."""
    one, other, label, mask = images.one, images.other, images.label, images.mask
    metrics, ap = _changes(one, other, label, mask, first.threshold(one.name), resamples=resamples, seed=seed)
    return Comparison(
        a=str(first.folder),
        b=str(second.folder),
        split=one.name,
        counts=images.counts,
        metrics=metrics,
        ap=dict(zip(first.labels, ap, strict=True)),
        positives=dict(zip(first.labels, (label * mask).sum(axis=0).astype(int).tolist(), strict=True)),
        changed=changed_images(one, other, label, mask, first.labels),
        resamples=resamples,
        seed=seed,
    )


def _columns(first: ComparedRun, second: ComparedRun) -> np.ndarray:
    """Return the columns of the first run's labels in the second, i64[K]; UserError unless the names are the same."""
    for run, other in ((first, second), (second, first)):
        there = set(other.labels)
        if lacking := [name for name in run.labels if name not in there]:
            raise UserError(
                f"the runs have different labels: {run.folder} has {len(run.labels)} including {lacking[0]}, which "
                f"{other.folder} lacks; compare runs on the same labels"
            )
    at = {name: column for column, name in enumerate(second.labels)}
    return np.array([at[name] for name in first.labels])


def _shared_images(
    first: ComparedRun, second: ComparedRun, in_first: SplitScores, in_second: SplitScores
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the common images, i64[n] each, in the order of the first run."""
    for run, scores in ((first, in_first), (second, in_second)):
        names, times = np.unique(scores.ids, return_counts=True)
        if (times > 1).any():
            raise UserError(
                f"{scores.name} of {run.folder} has the image {names[times > 1][0]} {times.max()} times, so "
                "images cannot be matched by name; keep it once"
            )
    _, rows, others = np.intersect1d(in_first.ids, in_second.ids, assume_unique=True, return_indices=True)
    if not rows.size:
        raise UserError(
            f"no image of {in_first.name} is in both runs: the first image is {in_first.ids[0]} in {first.folder} and "
            f"{in_second.ids[0]} in {second.folder}; evaluate both on the same data"
        )
    order = np.argsort(rows)
    return rows[order], others[order]


def _require_same_truth(first: ComparedRun, second: ComparedRun, one: SplitScores, other: SplitScores) -> None:
    differs = np.argwhere(one.codes != other.codes)
    if len(differs):
        row, column = differs[0]
        images = f"{len(np.unique(differs[:, 0])):,} of {len(one):,} images of {one.name}"
        raise UserError(
            f"{images} have other labels in {second.folder} than in {first.folder}, the first is {one.ids[row]} "
            f"at label {first.labels[column]}; evaluate both on the same data"
        )


def _changes(
    one: SplitScores,
    other: SplitScores,
    label: np.ndarray,
    mask: np.ndarray,
    threshold: float,
    *,
    resamples: int,
    seed: int,
) -> tuple[dict[str, Change], list[Change]]:
    """Return the change of each metric, and of the AP per label, with bootstrap intervals."""
    measures = [WeightedMetrics(split.scores, label, mask, threshold) for split in (one, other)]
    (was, ap_was), (now, ap_now) = (measure(np.ones((len(one), 1), np.float32)) for measure in measures)
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in was}
    drawn_ap = []
    progress = Progress(f"compare {one.name}", math.ceil(resamples / CHUNK), CHUNK * len(one))
    for weights in draw(len(one), resamples, seed):
        (values, ap), (other_values, other_ap) = (measure(weights) for measure in measures)
        for name in was:
            drawn[name].append(other_values[name] - values[name])
        drawn_ap.append(other_ap - ap)
        progress.advance()
    progress.close()

    def change(a: np.ndarray, b: np.ndarray, differences: list[np.ndarray]) -> list[Change]:
        low, high = (np.atleast_1d(end) for end in percentile_interval(np.concatenate(differences)))
        rows = zip(np.ravel(a).tolist(), np.ravel(b).tolist(), low.tolist(), high.tolist(), strict=True)
        return [Change(*row) for row in rows]

    metrics = {name: change(was[name], now[name], drawn[name])[0] for name in was}
    return metrics, change(ap_was, ap_now, drawn_ap)


def changed_images(
    one: SplitScores,
    other: SplitScores,
    label: np.ndarray,
    mask: np.ndarray,
    labels: Sequence[str],
    *,
    listed: int = LISTED,
) -> tuple[ChangedImage, ...]:
    """Return the images whose probabilities changed most on average over their known labels.

    one, other: the same N images, all with scores. label, mask: [N,K]. Images that did not change are left out;
    of equal changes the earlier image comes first.
    """
    known, right = np.asarray(mask) != 0, np.asarray(label) == 1
    distance = np.where(known, np.abs(other.scores - one.scores), 0.0)
    change = distance.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    found = []
    for row in [row for row in np.argsort(-change, kind="stable")[:listed] if change[row] > 0]:
        columns = np.flatnonzero(known[row])
        answers = (np.where(right[row], t.scores[row], 1 - t.scores[row])[columns].mean() for t in (one, other))
        most = columns[np.argsort(-distance[row, columns], kind="stable")[:_MOVES]]
        most = most[distance[row, most] > 0]
        scores = ([float(table.scores[row, k]) for table in (one, other)] for k in most)
        moves = (Move(labels[k], bool(right[row, k]), *pair) for k, pair in zip(most, scores, strict=True))
        truth = tuple(labels[k] for k in np.flatnonzero(right[row] & known[row]))
        found.append(ChangedImage(str(one.ids[row]), float(change[row]), *map(float, answers), truth, tuple(moves)))
    return tuple(found)
