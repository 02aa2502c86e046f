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

    def __str__(self) -> str:
        closer = (self.b > self.a) == self.positive  # to the truth
        return f"{'+' if closer else '−'} {self.label} {100 * self.a:.0f} → {100 * self.b:.0f} %"


@dataclass(frozen=True)
class ChangedImage:
    """An image whose probabilities differ between the runs.

    change: mean |b − a| of the probabilities of its known labels. a, b: mean probability of the truth, present or
    absent, over the known labels. labels: the present ones. moves: the labels that changed most.
    """

    id: str
    change: float
    a: float
    b: float
    labels: tuple[str, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Comparison:
    """Two runs on one split.

    counts: the number of images with scores in both runs (images), in only one (only_a, only_b), and unreadable in one
    of them (unread). metrics: by name. ap: the average precision of each label. positives: images of each label.
    changed: the images that changed most, the largest change first.
    """

    a: str
    b: str
    split: str
    counts: dict[str, int]
    metrics: dict[str, Change]
    ap: dict[str, Change]
    positives: dict[str, int]
    changed: tuple[ChangedImage, ...]
    resamples: int


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison, from its folder. settings: split -> config with which its scores were measured."""

    folder: RunFolder
    labels: tuple[str, ...]
    splits: dict[str, SplitScores]
    settings: dict[str, ConfigDict]
    reported: tuple[str, ...]

    @classmethod
    def of(cls, folder: RunFolder) -> ComparedRun:
        """Read a run folder; UserError if it has no scores."""
        folder.require(CONFIG)
        splits = read_scores(folder)
        settings = {name: read_settings(folder, of.prefix) for name, of in splits.items()}
        return cls(folder, read_labels(folder), splits, settings, read_config(folder).data.test_splits)


def shared_splits(first: ComparedRun, second: ComparedRun) -> list[str]:
    """Return the splits for which both runs have scores, starting with those that the first run reports."""
    ordered = dict.fromkeys((*first.reported, *first.splits))
    shared = [name for name in ordered if name in first.splits and name in second.splits]
    if not shared:
        raise UserError(
            f"{first.folder} has scores of {', '.join(first.splits)} and {second.folder} of "
            f"{', '.join(second.splits)}; run --mode=eval for both on the same --config.data.test_splits"
        )
    return shared


def compare_runs(
    first: ComparedRun, second: ComparedRun, *, split: str = "", resamples: int = RESAMPLES, seed: int = SEED
) -> Comparison:
    """Compare two runs on one split.

    The threshold of predictions and the treatment of difficult labels are those of the first run for both.

    Args:
      split: name of the split; "" is the first reported one of the first run for which both have scores.
      resamples: number of resamples of the images, for intervals.
      seed: of the resamples.

    Raises:
      UserError: a run has no scores, the labels or the truth differ, or no image is in both.
    """
    split = split or shared_splits(first, second)[0]
    one, other, counts = _match(first, second, split)
    settings = first.settings[split]
    label, mask = one.targets(settings.data.difficult_eval)
    measures = [WeightedMetrics(table.scores, label, mask, settings.eval.threshold) for table in (one, other)]
    metrics, ap = _changes(measures, split, len(one), resamples, seed)
    return Comparison(
        a=str(first.folder),
        b=str(second.folder),
        split=split,
        counts=counts,
        metrics=metrics,
        ap=dict(zip(first.labels, ap, strict=True)),
        positives=dict(zip(first.labels, (label * mask).sum(axis=0).astype(int).tolist(), strict=True)),
        changed=changed_images(one, other, label, mask, first.labels),
        resamples=resamples,
    )


# ------------------------------------------------------------------------------------------------- matching the images
def _match(first: ComparedRun, second: ComparedRun, split: str) -> tuple[SplitScores, SplitScores, dict[str, int]]:
    """Return the scores of both runs for the images that both have read, in the order and labels of the first."""
    whole, other = (require_split(run.folder, run.splits, split) for run in (first, second))
    if different := sorted(set(first.labels) ^ set(second.labels)):
        raise UserError(f"the runs have different labels, such as {different[0]}; compare runs on the same labels")
    other = other.with_labels(np.array([second.labels.index(name) for name in first.labels]))
    for table in (whole, other):
        names, times = np.unique(table.ids, return_counts=True)
        if (times > 1).any():
            raise UserError(f"{split} has the image {names[times > 1][0]} {times.max()} times; keep it once")
    _, rows, others = np.intersect1d(whole.ids, other.ids, assume_unique=True, return_indices=True)
    if not rows.size:
        raise UserError(f"no image of {split} is in both runs, such as {whole.ids[0]}; evaluate both on the same data")
    only_a, only_b, order = len(whole) - rows.size, len(other) - rows.size, np.argsort(rows)
    one, other = whole.take(rows[order]), other.take(others[order])
    differs = np.argwhere(one.codes != other.codes)
    if len(differs):
        where = f"such as {one.ids[differs[0, 0]]} at label {first.labels[differs[0, 1]]}"
        raise UserError(
            f"{len(np.unique(differs[:, 0])):,} of {len(one):,} images of {split} have other labels in {second.folder} "
            f"than in {first.folder}, {where}; evaluate both on the same data"
        )
    read = one.read & other.read
    if not read.any():
        raise UserError(f"none of the {len(read):,} common images of {split} has scores in both runs")
    counts = {"images": int(read.sum()), "only_a": only_a, "only_b": only_b, "unread": int((~read).sum())}
    return one.take(read), other.take(read), counts


# ------------------------------------------------------------------------------------------------------ the differences
def _changes(
    measures: Sequence[WeightedMetrics], split: str, images: int, resamples: int, seed: int
) -> tuple[dict[str, Change], list[Change]]:
    """Return the change of each metric, and of the AP per label, with bootstrap intervals."""
    (was, ap_was), (now, ap_now) = (measure(np.ones((images, 1), np.float32)) for measure in measures)
    differences: dict[str, list[np.ndarray]] = {name: [] for name in was}
    ap_differences = []
    progress = Progress(f"compare {split}", math.ceil(resamples / CHUNK), CHUNK * images)
    for weights in draw(images, resamples, seed):
        (values, ap), (other_values, other_ap) = (measure(weights) for measure in measures)
        for name in was:
            differences[name].append(other_values[name] - values[name])
        ap_differences.append(other_ap - ap)
        progress.advance()
    progress.close()

    def change(a: np.ndarray, b: np.ndarray, parts: list[np.ndarray]) -> list[Change]:
        low, high = (np.atleast_1d(end) for end in percentile_interval(np.concatenate(parts)))
        rows = zip(np.ravel(a).tolist(), np.ravel(b).tolist(), low.tolist(), high.tolist(), strict=True)
        return [Change(*row) for row in rows]

    metrics = {name: change(was[name], now[name], differences[name])[0] for name in was}
    return metrics, change(ap_was, ap_now, ap_differences)


def changed_images(
    one: SplitScores, other: SplitScores, label: np.ndarray, mask: np.ndarray, labels: Sequence[str]
) -> tuple[ChangedImage, ...]:
    """Return at most LISTED images whose probabilities changed most on average over their known labels.

    Images that did not change are left out; of equal changes the earlier image comes first.

    Args:
      one, other: the same N images, all with scores.
      label, mask: f32[N,K].
      labels: names of the K labels.
    """
    known, positive = mask != 0, label == 1
    distance = np.where(known, np.abs(other.scores - one.scores), 0.0)
    change = distance.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    changed = []
    for row in [row for row in np.argsort(-change, kind="stable")[:LISTED] if change[row] > 0]:
        truth = [np.where(positive[row], t.scores[row], 1 - t.scores[row])[known[row]].mean() for t in (one, other)]
        most = np.argsort(-distance[row], kind="stable")[:_MOVES]
        moves = tuple(
            Move(labels[k], bool(positive[row, k]), float(one.scores[row, k]), float(other.scores[row, k]))
            for k in most[distance[row, most] > 0]
        )
        present = tuple(labels[k] for k in np.flatnonzero(positive[row] & known[row]))
        changed.append(ChangedImage(str(one.ids[row]), float(change[row]), *map(float, truth), present, moves))
    return tuple(changed)
