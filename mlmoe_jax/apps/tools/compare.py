"""Compare two runs on the images for which both have scores (`--mode=compare`).

Shape letters: N images, K labels, R resamples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np
from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.bootstrap import RESAMPLES_AT_ONCE, WeightedMetrics, draw, percentile_interval
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.results import (
    MetricSettings,
    SplitScores,
    metric_scores,
    read_labels,
    read_scores,
    read_split_results,
    require_split,
)
from mlmoe_jax.runs.folder import CONFIG, LABEL_SPACE, RunFolder, read_config, read_label_space
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import OutputTarget, open_output
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import percent

RESAMPLES, SEED = 1000, 0
CHANGED_IMAGES = 100  # images per split that changed most
_MOVES = 3  # labels per image
_SHOWN = 10  # rows of a printed table


@dataclass(frozen=True)
class MetricChange:
    """A metric of both runs as fractions.

    Attributes:
      a, b: the values of the runs.
      difference: b − a.
      low, high: the 95 % interval of the difference over resampled images.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class ScoreChange:
    """The probabilities of one label of one image, and whether the image has the label."""

    label: str
    positive: bool
    a: float
    b: float

    def __str__(self) -> str:
        is_closer = (self.b > self.a) == self.positive  # b is closer to the truth
        return f"{'+' if is_closer else '−'} {self.label} {100 * self.a:.0f} → {100 * self.b:.0f} %"


@dataclass(frozen=True)
class ChangedImage:
    """An image whose probabilities differ between the runs.

    Attributes:
      id: its id in the data set.
      change: mean |b − a| of the probabilities of its known labels.
      labels: the present labels.
      moves: the labels that changed most.
    """

    id: str
    change: float
    labels: tuple[str, ...]
    moves: tuple[ScoreChange, ...]


@dataclass(frozen=True)
class Comparison:
    """Two runs on one split.

    Attributes:
      a, b: the folders of the runs.
      split: the name of the split.
      counts: the number of images with scores in both runs (images), in only one run (only_a, only_b), and unreadable
        in a run (unread).
      metrics: changes of the metrics by name.
      ap: changes of the average precision of each label.
      positives: number of images of each label.
      changed: the images that changed most, the largest change first.
      resamples: number of resamples for the intervals.
    """

    a: str
    b: str
    split: str
    counts: dict[str, int]
    metrics: dict[str, MetricChange]
    ap: dict[str, MetricChange]
    positives: dict[str, int]
    changed: tuple[ChangedImage, ...]
    resamples: int


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison.

    Attributes:
      folder: the run folder.
      labels: the names of the labels.
      splits: the scores of each split.
      settings: the settings of each split's metrics.
      reported: the names of the splits that the run reports.
    """

    folder: RunFolder
    labels: tuple[str, ...]
    splits: dict[str, SplitScores]
    settings: dict[str, MetricSettings]
    reported: tuple[str, ...]

    @classmethod
    def of(cls, folder: RunFolder) -> ComparedRun:
        """Read a run folder; UserError if it has no scores."""
        folder.require(CONFIG)
        splits = read_scores(folder)
        settings = {name: entry.settings for name, entry in read_split_results(folder).items()}
        if (folder / LABEL_SPACE).exists():
            tree = read_label_space(folder).tree
            splits = {name: metric_scores(split, tree, settings[name]) for name, split in splits.items()}
        return cls(folder, read_labels(folder), splits, settings, read_config(folder).data.test_splits)


def first_shared_split(first: ComparedRun, second: ComparedRun) -> str:
    """Return a split for which both runs have scores, if possible one that the first run reports."""
    for name in (*first.reported, *first.splits):
        if name in first.splits and name in second.splits:
            return name
    raise UserError(
        f"{first.folder} has scores of {', '.join(first.splits)} and {second.folder} of "
        f"{', '.join(second.splits)}; run --mode=eval for both on the same --config.data.test_splits"
    )


def compare_runs(
    first: ComparedRun, second: ComparedRun, *, split: str | None = None, resamples: int = RESAMPLES
) -> Comparison:
    """Compare two runs on one split.

    The settings of the first run define the threshold of predictions and the treatment of difficult labels for both
    runs.

    Args:
      first, second: the runs a and b.
      split: name of the split; by default see `first_shared_split`.
      resamples: number of resamples of the images, for intervals.

    Raises:
      UserError: a run has no scores, the labels or the truth differ, or no image is in both.
    """
    split = split or first_shared_split(first, second)
    a, b, counts = _match_images(first, second, split)
    settings = first.settings[split]
    truth = a.entries(settings.difficult)
    measures = [WeightedMetrics(scored.scores, truth.positive, truth.valid, settings.threshold) for scored in (a, b)]
    names, changes = _measure_changes(measures, split, len(a), resamples)
    positives = (truth.positive & truth.valid).sum(axis=0).tolist()
    return Comparison(
        a=str(first.folder),
        b=str(second.folder),
        split=split,
        counts=counts,
        metrics=dict(zip(names, changes, strict=False)),
        ap=dict(zip(first.labels, changes[len(names) :], strict=True)),
        positives=dict(zip(first.labels, positives, strict=True)),
        changed=changed_images(a, b, truth, first.labels),
        resamples=resamples,
    )


# ------------------------------------------------------------------------------------------------- matching the images
def _match_images(
    first: ComparedRun, second: ComparedRun, split: str
) -> tuple[SplitScores, SplitScores, dict[str, int]]:
    """Return the scores of both runs for the images that both could read, and `Comparison.counts`.

    Images and labels are in the order of the first run.
    """
    a, b = (require_split(run.folder, run.splits, split) for run in (first, second))
    if different := sorted(set(first.labels) ^ set(second.labels)):
        raise UserError(f"the runs have different labels, such as {different[0]}; compare runs on the same labels")
    b = b.with_labels(np.array([second.labels.index(name) for name in first.labels]))
    only_a, only_b = np.setdiff1d(a.ids, b.ids).size, np.setdiff1d(b.ids, a.ids).size
    _, rows_a, rows_b = np.intersect1d(a.ids, b.ids, return_indices=True)  # the first of repeated images
    order = np.argsort(rows_a)
    a, b = a.take(rows_a[order]), b.take(rows_b[order])
    _require_same_truth(first, second, a, b)
    is_read = a.read & b.read
    if not is_read.any():
        raise UserError(f"no image of {split} has scores in both runs; evaluate both on the same data")
    counts = {"images": int(is_read.sum()), "only_a": only_a, "only_b": only_b, "unread": int((~is_read).sum())}
    return a.take(is_read), b.take(is_read), counts


def _require_same_truth(first: ComparedRun, second: ComparedRun, a: SplitScores, b: SplitScores) -> None:
    """Raise UserError if labels of equal images differ between the runs."""
    differs = np.argwhere(a.codes != b.codes)
    if len(differs):
        row, k = differs[0]
        raise UserError(
            f"{len(np.unique(differs[:, 0])):,} of {len(a):,} images of {a.name} have other labels in {second.folder} "
            f"than in {first.folder}, such as {a.ids[row]} at label {first.labels[k]}; evaluate both on the same data"
        )


# ------------------------------------------------------------------------------------------------------ the differences
def _measure_changes(
    measures: Sequence[WeightedMetrics], split: str, images: int, resamples: int
) -> tuple[list[str], list[MetricChange]]:
    """Return the names of the metrics, and their changes followed by the changes of the AP of each label."""

    def values(measure: WeightedMetrics, weights: np.ndarray) -> np.ndarray:
        metrics, ap = measure(weights)
        return np.column_stack([*metrics.values(), ap])

    differences = []
    batches, size = math.ceil(resamples / RESAMPLES_AT_ONCE), RESAMPLES_AT_ONCE * images
    with contextlib.closing(Progress(f"compare {split}", batches, size)) as progress:
        for weights in draw(images, resamples, SEED):
            a, b = (values(measure, weights) for measure in measures)
            differences.append(b - a)
            progress.advance()
    once = np.ones((images, 1), np.float32)
    a, b = (values(measure, once)[0] for measure in measures)
    low, high = percentile_interval(np.concatenate(differences))
    return list(measures[0](once)[0]), [
        MetricChange(*row) for row in np.column_stack([a, b, b - a, low, high]).tolist()
    ]


def changed_images(a: SplitScores, b: SplitScores, truth: Entries, labels: Sequence[str]) -> tuple[ChangedImage, ...]:
    """Return at most CHANGED_IMAGES images with the largest mean change over their known labels.

    Images without a change are left out. Of equal changes, the earlier image comes first.

    Args:
      a, b: the scores of N equal images, all readable.
      truth: the truth about the images.
      labels: names of the K labels.
    """
    known = truth.valid
    distances = np.where(known, np.abs(b.scores - a.scores), 0.0)
    changes = distances.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    largest = np.argsort(-changes, kind="stable")[:CHANGED_IMAGES]
    return tuple(
        ChangedImage(
            id=str(a.ids[row]),
            change=float(changes[row]),
            labels=tuple(labels[k] for k in np.flatnonzero(truth.positive[row] & known[row])),
            moves=_score_changes(a.scores[row], b.scores[row], distances[row], truth.positive[row], labels),
        )
        for row in largest[changes[largest] > 0]
    )


def _score_changes(
    a: np.ndarray, b: np.ndarray, distances: np.ndarray, positive: np.ndarray, labels: Sequence[str]
) -> tuple[ScoreChange, ...]:
    """Return the labels of one image that changed most. Arrays have shape [K]."""
    largest = np.argsort(-distances, kind="stable")[:_MOVES]
    return tuple(
        ScoreChange(labels[k], bool(positive[k]), float(a[k]), float(b[k])) for k in largest if distances[k] > 0
    )


# --------------------------------------------------------------------------------------------------------- the command
def compare_folders(a: RunFolder, b: RunFolder, *, split: str | None = None, output: str | None = None) -> Outcome:
    """Compare two runs on one split; return a heading, the changes and the images that changed most.

    Args:
      a, b: the run folders.
      split: as in `compare_runs`.
      output: path of a CSV file of all changes, as fractions.

    Raises:
      UserError: as `compare_runs`, and if `a` and `b` are one folder.
    """
    if a.path == b.path:
        raise UserError(f"both --workdir are {a}; give the folders of two runs")
    comparison = compare_runs(ComparedRun.of(a), ComparedRun.of(b), split=split)
    changes = _change_rows(comparison)
    if output:
        with open_output(OutputTarget(epath.Path(output), "csv")) as file:
            file.write(Table(_COLUMNS, changes).csv())
        status(f"written to {output}")
    shown = Table(_COLUMNS, changes[: len(comparison.metrics) + _SHOWN], notes=["* the interval excludes 0"])
    parts = (_heading(comparison), shown, _image_table(comparison.changed[:_SHOWN]))
    return Outcome(parts, {comparison.split: asdict(comparison) | comparison.counts})


def _signed_percent(value: float) -> str:
    return percent(value, sign="+")


_COLUMNS = (
    Column("metric", align="<"),
    *(Column(run, percent) for run in ("a", "b")),
    *(Column(name, _signed_percent) for name in ("difference", "low", "high")),
    Column("clear", lambda clear: "*" if clear else ""),
)


def _change_rows(comparison: Comparison) -> list[list[str | float | bool]]:
    """Return one row per metric, and one per label, the largest change first."""
    ap = sorted(comparison.ap.items(), key=lambda item: -np.nan_to_num(abs(item[1].difference), nan=-1))
    changes = [*comparison.metrics.items(), *((f"AP of {label}", change) for label, change in ap)]
    return [[name, *astuple(change), change.clear] for name, change in changes]


def _heading(comparison: Comparison) -> str:
    counts = comparison.counts
    return (
        f"{comparison.split}: {counts['images']:,} images in both runs ({counts['only_a']:,} only in a, "
        f"{counts['only_b']:,} only in b, {counts['unread']:,} without scores)\n"
        f"a = {comparison.a}\n"
        f"b = {comparison.b}\n"
        f"in percent; low, high: 95 % interval of b − a over {comparison.resamples:,} resamples of the images"
    )


def _image_table(images: Sequence[ChangedImage]) -> Table:
    names = ("image", "present labels", "label a → b, + closer to the truth")
    rows = [[image.change, image.id, ", ".join(image.labels), "; ".join(map(str, image.moves))] for image in images]
    columns = [Column("%", percent), *(Column(name, align="<") for name in names)]
    return Table(columns, rows, title="images that changed most: mean change of a probability")
