"""Compare two runs on the images for which both have scores, and print or write the comparison (`--mode=compare`).

Shape letters: N images, K labels, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import numpy as np
from etils import epath

from mlmoe_jax.errors import DONE, UserError
from mlmoe_jax.evaluation.metrics.bootstrap import CHUNK, WeightedMetrics, draw, percentile_interval
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
from mlmoe_jax.runtime.formats import row_writer, to_json
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import Target, open_target
from mlmoe_jax.runtime.text import percent, text_table

RESAMPLES, SEED = 1000, 0
LISTED = 100  # images per split that changed most
_MOVES = 3  # labels per listed image
_SHOWN = 10  # rows of a printed table
# The columns of the CSV. For images, a and b are as in ChangedImage.
_COLUMNS = ("split", "kind", "name", "positives", "a", "b", "difference", "low", "high", "moves")


@dataclass(frozen=True)
class Change:
    """A metric of both runs as fractions, and the 95 % interval of its difference b − a over resampled images."""

    a: float
    b: float
    low: float
    high: float

    @property
    def difference(self) -> float:
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
        closer = (self.b > self.a) == self.positive  # b is closer to the truth
        return f"{'+' if closer else '−'} {self.label} {100 * self.a:.0f} → {100 * self.b:.0f} %"


@dataclass(frozen=True)
class ChangedImage:
    """An image whose probabilities differ between the runs.

    Attributes:
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
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Comparison:
    """Two runs on one split.

    Attributes:
      a, b: the folders of the runs.
      counts: the number of images with scores in both runs (images), in only one run (only_a, only_b), and unreadable
        in a run (unread).
      metrics: changes of the metrics by name.
      ap: changes of the average precision of each label.
      positives: number of images of each label.
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
    """A run of a comparison. `settings` maps splits to the settings of their metrics."""

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


def compare_runs(
    first: ComparedRun, second: ComparedRun, *, split: str = "", resamples: int = RESAMPLES, seed: int = SEED
) -> Comparison:
    """Compare two runs on one split.

    The config of the first run defines the threshold of predictions and the treatment of difficult labels for both
    runs.

    Args:
      split: name of the split; by default the first of `shared_splits`.
      resamples: number of resamples of the images, for intervals.
      seed: seed of the resamples.

    Raises:
      UserError: a run has no scores, the labels or the truth differ, or no image is in both.
    """
    split = split or shared_splits(first, second)[0]
    one, other, counts = _match(first, second, split)
    settings = first.settings[split]
    entries = one.entries(settings.difficult)
    measures = [
        WeightedMetrics(table.scores, entries.positive, entries.valid, settings.threshold) for table in (one, other)
    ]
    names, changes = _changes(measures, split, len(one), resamples, seed)
    return Comparison(
        a=str(first.folder),
        b=str(second.folder),
        split=split,
        counts=counts,
        metrics=dict(zip(names, changes, strict=False)),
        ap=dict(zip(first.labels, changes[len(names) :], strict=True)),
        positives=dict(zip(first.labels, (entries.positive & entries.valid).sum(axis=0).tolist(), strict=True)),
        changed=changed_images(one, other, entries, first.labels),
        resamples=resamples,
    )


# ------------------------------------------------------------------------------------------------- matching the images
def _match(first: ComparedRun, second: ComparedRun, split: str) -> tuple[SplitScores, SplitScores, dict[str, int]]:
    """Return the scores of both runs for the images that both have read, in the order of the first run."""
    whole, other = (require_split(run.folder, run.splits, split) for run in (first, second))
    if different := sorted(set(first.labels) ^ set(second.labels)):
        raise UserError(f"the runs have different labels, such as {different[0]}; compare runs on the same labels")
    other = other.with_labels(np.array([second.labels.index(name) for name in first.labels]))
    only_a, only_b = np.setdiff1d(whole.ids, other.ids).size, np.setdiff1d(other.ids, whole.ids).size
    _, rows, others = np.intersect1d(whole.ids, other.ids, return_indices=True)  # the first of repeated images
    order = np.argsort(rows)
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
        raise UserError(f"no image of {split} has scores in both runs; evaluate both on the same data")
    counts = {"images": int(read.sum()), "only_a": only_a, "only_b": only_b, "unread": int((~read).sum())}
    return one.take(read), other.take(read), counts


# ------------------------------------------------------------------------------------------------------ the differences
def _changes(
    measures: Sequence[WeightedMetrics], split: str, images: int, resamples: int, seed: int
) -> tuple[list[str], list[Change]]:
    """Return the names of the metrics, and the changes of the metrics and then of the AP per label."""
    names: list[str] = []

    def values(measure: WeightedMetrics, weights: np.ndarray) -> np.ndarray:
        metrics, ap = measure(weights)
        names[:] = metrics
        return np.column_stack([*metrics.values(), ap])

    differences = []
    progress = Progress(f"compare {split}", math.ceil(resamples / CHUNK), CHUNK * images)
    for weights in draw(images, resamples, seed):
        a, b = (values(measure, weights) for measure in measures)
        differences.append(b - a)
        progress.advance()
    progress.close()
    a, b = (values(measure, np.ones((images, 1), np.float32))[0] for measure in measures)
    ends = percentile_interval(np.concatenate(differences))
    return names, [Change(*row) for row in np.column_stack([a, b, *ends]).tolist()]


def changed_images(
    one: SplitScores, other: SplitScores, truth: Entries, labels: Sequence[str]
) -> tuple[ChangedImage, ...]:
    """Return at most LISTED images with the largest mean change over their known labels.

    Images without a change are left out; of equal changes the earlier image comes first.

    Args:
      one, other: N equal images, all with scores.
      truth: the truth about the images.
      labels: names of the K labels.
    """
    known, positive = truth.valid, truth.positive
    distance = np.where(known, np.abs(other.scores - one.scores), 0.0)
    change = distance.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    changed = []
    for row in [row for row in np.argsort(-change, kind="stable")[:LISTED] if change[row] > 0]:
        right = [np.where(positive[row], t.scores[row], 1 - t.scores[row])[known[row]].mean() for t in (one, other)]
        most = np.argsort(-distance[row], kind="stable")[:_MOVES]
        moves = tuple(
            Move(labels[k], bool(positive[row, k]), float(one.scores[row, k]), float(other.scores[row, k]))
            for k in most[distance[row, most] > 0]
        )
        present = tuple(labels[k] for k in np.flatnonzero(positive[row] & known[row]))
        changed.append(ChangedImage(str(one.ids[row]), float(change[row]), *map(float, right), present, moves))
    return tuple(changed)


# -------------------------------------------------------------------------------------------------- the command line
def compare_folders(
    a: RunFolder,
    b: RunFolder,
    *,
    split: str | None = None,
    output: str | None = None,
    as_json: bool = False,
    resamples: int = RESAMPLES,
) -> int:
    """Compare two runs, print tables or JSON, and return the exit code.

    Args:
      a, b: the run folders.
      split: a split; by default all of `shared_splits`.
      output: path of a .csv or .json file.
      as_json: print JSON.
      resamples: as in `compare_runs`.

    Raises:
      UserError: as `compare_runs`, and if `a` and `b` are one folder.
    """
    if a.path == b.path:
        raise UserError(f"both --workdir are {a}; give the folders of two runs")
    if output and not output.endswith((".csv", ".json")):
        raise UserError(f"--output={output} should end in .csv or .json")
    first, second = ComparedRun.of(a), ComparedRun.of(b)
    comparisons, names = [], [split] if split else shared_splits(first, second)
    for name in names:
        try:
            comparisons.append(compare_runs(first, second, split=name, resamples=resamples))
        except UserError as error:
            if not comparisons and name == names[-1]:
                raise
            status(f"{name} is left out: {error}")
    for name in (one.split for one in comparisons):
        used, other = (run.settings[name].difficult for run in (first, second))
        if used != other:
            status(f"difficult labels of {name} count as {used} for both runs, according to data.difficult_eval of {a}")
    report = to_json({one.split: as_dict(one) for one in comparisons}, indent=2)
    if output:
        with open_target(Target(epath.Path(output), "")) as file:
            _write_table(file, comparisons) if output.endswith(".csv") else file.write(report + "\n")
        status(f"written to {output}")
    print(report if as_json else "\n\n".join(map(format_comparison, comparisons)))
    return DONE


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as values for JSON."""
    values = asdict(comparison)
    values |= values.pop("counts")
    for changes in (values["metrics"], values["ap"]):
        for change in changes.values():
            change["difference"] = change["b"] - change["a"]
    return values


def _write_table(file: TextIO, comparisons: Sequence[Comparison]) -> None:
    """Write a CSV: fractions with all digits. A cell is empty if a kind of row lacks the column."""
    write = row_writer(file)
    write(_COLUMNS)
    for one in comparisons:
        for row in _rows(one):
            write(row.get(column, "") for column in _COLUMNS)


def _rows(one: Comparison) -> Iterator[dict[str, Any]]:
    for kind, changes in (("metric", one.metrics), ("AP", one.ap)):
        for name, item in changes.items():
            row = {"split": one.split, "kind": kind, "name": name, **vars(item), "difference": item.difference}
            yield row | ({"positives": one.positives[name]} if kind == "AP" else {})
    for image in one.changed:
        row = {"split": one.split, "kind": "image", "name": image.id, "positives": len(image.labels)}
        row |= {"a": image.a, "b": image.b, "difference": image.b - image.a}
        yield row | {"moves": "; ".join(map(str, image.moves))}


def format_comparison(comparison: Comparison) -> str:
    """Return a comparison as tables in percent."""
    one, counts = comparison, comparison.counts
    others = {"only_a": "only in a", "only_b": "only in b", "unread": "without scores"}
    beside = ", ".join(f"{counts[kind]:,} {what}" for kind, what in others.items() if counts[kind])
    labels = sorted(one.ap, key=lambda name: -np.nan_to_num(abs(one.ap[name].difference), nan=-1))[:_SHOWN]
    title = f", the {len(labels)} of {len(one.ap)} labels that changed most" if len(one.ap) > _SHOWN else ""
    lines = [
        f"{one.split}: {counts['images']:,} images in both runs" + (f" ({beside})" if beside else ""),
        f"a = {one.a}",
        f"b = {one.b}",
        f"[95 % interval of b − a over {one.resamples:,} resamples of the images], * if it excludes 0",
        *_table("metric, %", one.metrics),
        "",
        *_table(f"AP, %{title}", {name: one.ap[name] for name in labels}),
        "",
        "images that changed most: mean change of a probability, (present labels), label a → b, + closer to the truth",
    ]
    for image in one.changed[:_SHOWN]:
        name = image.id.encode(errors="surrogateescape").decode(errors="replace")
        lines.append(
            f"{100 * image.change:6.2f}  {name} ({', '.join(image.labels)})  {'; '.join(map(str, image.moves))}"
        )
    return "\n".join(lines)


def _table(title: str, changes: dict[str, Change]) -> list[str]:
    rows = [["", "a", "b", "b − a", ""]]
    for name, item in changes.items():
        low, high = percent(item.low, sign="+"), percent(item.high, sign="+")
        interval = f"[{low}, {high}]{' *' if item.clear else ''}"
        rows.append([name, percent(item.a), percent(item.b), percent(item.difference, sign="+"), interval])
    return [title, text_table(rows, align="<>>><", least=(0, 6, 6, 6, 0))]
