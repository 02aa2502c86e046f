"""Compare two runs on the images for which both have scores (`--mode=compare`).

Shape letters: N images, K labels, R resamples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

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
from mlmoe_jax.runtime.text import percent, printable

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
      a, b: mean probability of the truth, present or absent, over the known labels.
      labels: the present labels.
      moves: the labels that changed most.
    """

    id: str
    change: float
    a: float
    b: float
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


def shared_splits(first: ComparedRun, second: ComparedRun) -> list[str]:
    """Return the splits for which both runs have scores, reported splits of the first run first."""
    ordered = dict.fromkeys((*first.reported, *first.splits))
    shared = [name for name in ordered if name in first.splits and name in second.splits]
    if not shared:
        raise UserError(
            f"{first.folder} has scores of {', '.join(first.splits)} and {second.folder} of "
            f"{', '.join(second.splits)}; run --mode=eval for both on the same --config.data.test_splits"
        )
    return shared


def compare_runs(first: ComparedRun, second: ComparedRun, *, split: str = "", resamples: int = RESAMPLES) -> Comparison:
    """Compare two runs on one split.

    The settings of the first run define the threshold of predictions and the treatment of difficult labels for both
    runs.

    Args:
      first, second: the runs a and b.
      split: name of the split; by default the first of `shared_splits`.
      resamples: number of resamples of the images, for intervals.

    Raises:
      UserError: a run has no scores, the labels or the truth differ, or no image is in both.
    """
    split = split or shared_splits(first, second)[0]
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
    names: list[str] = []

    def values(measure: WeightedMetrics, weights: np.ndarray) -> np.ndarray:
        metrics, ap = measure(weights)
        names[:] = metrics
        return np.column_stack([*metrics.values(), ap])

    differences = []
    batches, size = math.ceil(resamples / RESAMPLES_AT_ONCE), RESAMPLES_AT_ONCE * images
    with contextlib.closing(Progress(f"compare {split}", batches, size)) as progress:
        for weights in draw(images, resamples, SEED):
            a, b = (values(measure, weights) for measure in measures)
            differences.append(b - a)
            progress.advance()
    a, b = (values(measure, np.ones((images, 1), np.float32))[0] for measure in measures)
    low, high = percentile_interval(np.concatenate(differences))
    return names, [MetricChange(*row) for row in np.column_stack([a, b, b - a, low, high]).tolist()]


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
    true_a, true_b = (np.where(truth.positive, scored.scores, 1 - scored.scores) for scored in (a, b))
    return tuple(
        ChangedImage(
            id=str(a.ids[row]),
            change=float(changes[row]),
            a=float(true_a[row][known[row]].mean()),
            b=float(true_b[row][known[row]].mean()),
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
def compare_folders(
    a: RunFolder, b: RunFolder, *, split: str | None = None, output: str | None = None, resamples: int = RESAMPLES
) -> Outcome:
    """Compare two runs; return tables per split, and write a file.

    Args:
      a, b: the run folders.
      split: a split; by default all of `shared_splits`.
      output: path of a .csv file.
      resamples: as in `compare_runs`.

    Raises:
      UserError: as `compare_runs`, and if `a` and `b` are one folder.
    """
    if a.path == b.path:
        raise UserError(f"both --workdir are {a}; give the folders of two runs")
    if output and not output.endswith(".csv"):
        raise UserError(f"--output={output} should end in .csv")
    comparisons = _compare_splits(ComparedRun.of(a), ComparedRun.of(b), split, resamples)
    if output:
        with open_output(OutputTarget(epath.Path(output), "csv")) as file:
            file.write(_csv_table(comparisons).csv())
        status(f"written to {output}")
    parts = [part for comparison in comparisons for part in comparison_parts(comparison)]
    return Outcome(parts, {comparison.split: comparison_document(comparison) for comparison in comparisons})


def _compare_splits(first: ComparedRun, second: ComparedRun, split: str | None, resamples: int) -> list[Comparison]:
    """Compare all splits that can be compared, or one split; UserError if there are none."""
    comparisons: list[Comparison] = []
    splits = [split] if split else shared_splits(first, second)
    for name in splits:
        try:
            comparisons.append(compare_runs(first, second, split=name, resamples=resamples))
        except UserError as error:
            if not comparisons and name == splits[-1]:
                raise
            status(f"{name} is left out: {error}")
    return comparisons


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as values for JSON."""
    values = asdict(comparison)
    counts = values.pop("counts")
    return values | counts


def comparison_parts(comparison: Comparison) -> list[str | Table]:
    """Return a heading, and tables of the metrics, of the labels and of the images that changed most."""
    counts = comparison.counts
    heading = (
        f"{comparison.split}: {counts['images']:,} images in both runs ({counts['only_a']:,} only in a, "
        f"{counts['only_b']:,} only in b, {counts['unread']:,} without scores)\n"
        f"a = {comparison.a}\n"
        f"b = {comparison.b}\n"
        f"[95 % interval of b − a over {comparison.resamples:,} resamples of the images], * if it excludes 0"
    )
    labels = sorted(comparison.ap, key=lambda name: -np.nan_to_num(abs(comparison.ap[name].difference), nan=-1))
    return [
        heading,
        _change_table("metric, %", comparison.metrics),
        _change_table("AP of the labels that changed most, %", {name: comparison.ap[name] for name in labels[:_SHOWN]}),
        _image_table(comparison.changed[:_SHOWN]),
    ]


def _change_table(title: str, changes: dict[str, MetricChange]) -> Table:
    columns = [
        Column("", align="<"),
        *(Column(run, percent, width=6) for run in ("a", "b")),
        Column("b − a", _signed_percent, width=6),
        Column("", align="<"),
    ]
    rows = []
    for name, item in changes.items():
        interval = f"[{_signed_percent(item.low)}, {_signed_percent(item.high)}]"
        rows.append([name, item.a, item.b, item.difference, f"{interval} *" if item.clear else interval])
    return Table(columns, rows, title=title)


def _signed_percent(value: float) -> str:
    return percent(value, sign="+")


def _image_table(images: Sequence[ChangedImage]) -> Table:
    names = ("image", "present labels", "label a → b, + closer to the truth")
    rows = [
        [
            image.change,
            printable(image.id),
            ", ".join(image.labels),
            "; ".join(map(str, image.moves)),
        ]
        for image in images
    ]
    columns = [Column("%", percent), *(Column(name, align="<") for name in names)]
    return Table(columns, rows, title="images that changed most: mean change of a probability")


def _csv_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table of all metrics, labels and images of all splits, as fractions.

    For images, a and b are as in `ChangedImage`.
    """
    columns = ("split", "kind", "name", "positives", "a", "b", "difference", "low", "high", "moves")
    rows: list[list[Any]] = []
    for comparison in comparisons:
        for name, item in comparison.metrics.items():
            rows.append([comparison.split, "metric", name, None, *astuple(item), None])
        for name, item in comparison.ap.items():
            rows.append([comparison.split, "AP", name, comparison.positives[name], *astuple(item), None])
        for image in comparison.changed:
            moves = "; ".join(map(str, image.moves))
            numbers = [len(image.labels), image.a, image.b, image.b - image.a]
            rows.append([comparison.split, "image", image.id, *numbers, None, None, moves])
    return Table(columns, rows)
