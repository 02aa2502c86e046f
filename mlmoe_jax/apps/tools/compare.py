"""Compare two runs on the images for which both have scores (`mlmoe compare`).

Shape letters: N images, K labels, R resamples.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial

import numpy as np
from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.bootstrap import RESAMPLES_AT_ONCE, WeightedMetrics, draw, percentile_interval
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import RunFolder
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
    """The values of a metric in two runs a and b, and their difference b − a, as fractions.

    `low` and `high` are the ends of the 95 % bootstrap interval of the difference, over resamples of the images.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class ScoreChange:
    """The change of the probability of a label for an image from run a to b. `positive`: the image has the label."""

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
      change: the mean of |b − a| over the labels whose truth is known, for the probabilities a and b of the two runs.
      labels: the names of the present labels.
      moves: the labels with the largest changes of the probability, at most _MOVES.
    """

    id: str
    change: float
    labels: tuple[str, ...]
    moves: tuple[ScoreChange, ...]


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs on one split.

    Attributes:
      a: the folder of run a.
      b: the folder of run b.
      counts: numbers of images: `images` (with scores in both runs), `only_a`, `only_b` (in only one run) and `unread`
        (in both runs, but unreadable in at least one).
      metrics: name of a metric -> its change.
      ap: label -> change of its average precision.
      positives: label -> number of images with the label.
      changed: the images whose probabilities changed most, sorted by decreasing change.
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


def first_shared_split(first: StoredRun, second: StoredRun) -> str:
    """Return a split for which both runs have scores, preferably a test split of the first; UserError if none."""
    for name in (*first.config.data.test_splits, *first.scored_splits):
        if name in first.scored_splits and name in second.scored_splits:
            return name
    raise UserError(
        f"{first.folder} has scores of {', '.join(first.scored_splits)} and {second.folder} of "
        f"{', '.join(second.scored_splits)}; run mlmoe eval for both on the same --config.data.test_splits"
    )


def compare_runs(
    first: StoredRun, second: StoredRun, *, split: str | None = None, resamples: int = RESAMPLES
) -> Comparison:
    """Compare two runs on one split, by default `first_shared_split`.

    The metrics of both runs are computed with the settings of the first run: the threshold of predictions, and the
    treatment of difficult labels. `resamples` is the number of bootstrap resamples of the images, for the intervals.

    Raises:
      UserError: a run has no scores, the runs have different labels or a different truth, or no image is in both runs.
    """
    split = split or first_shared_split(first, second)
    a, b, counts = _match_images(first, second, split)
    settings = first.settings(split)
    truth = a.entries(settings.difficult)
    options = (truth.positive, truth.valid, settings.threshold, first.tree.attributes)
    measures = [WeightedMetrics(scored.scores, *options) for scored in (a, b)]
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
def _match_images(first: StoredRun, second: StoredRun, split: str) -> tuple[SplitScores, SplitScores, dict[str, int]]:
    """Return both runs' scores for images that both could read, in the first run's order, and `Comparison.counts`."""
    a, b = (run.measured_split(split) for run in (first, second))
    if different := sorted(set(first.labels) ^ set(second.labels)):
        raise UserError(f"the runs have different labels, such as {different[0]}; compare runs on the same labels")
    b = b.with_labels(np.array([second.labels.index(name) for name in first.labels]))
    only_a, only_b = np.setdiff1d(a.ids, b.ids).size, np.setdiff1d(b.ids, a.ids).size
    _, rows_a, rows_b = np.intersect1d(a.ids, b.ids, return_indices=True)  # the first of repeated images
    order = np.argsort(rows_a)
    a, b = a.take(rows_a[order]), b.take(rows_b[order])
    if len(differs := np.argwhere(a.codes != b.codes)):
        row, k = differs[0]
        raise UserError(
            f"{len(np.unique(differs[:, 0])):,} of {len(a):,} images of {split} have other labels in {second.folder} "
            f"than in {first.folder}, such as {a.ids[row]} at label {first.labels[k]}; evaluate both on the same data"
        )
    is_read = a.read & b.read
    if not is_read.any():
        raise UserError(f"no image of {split} has scores in both runs; evaluate both on the same data")
    counts = {"images": int(is_read.sum()), "only_a": only_a, "only_b": only_b, "unread": int((~is_read).sum())}
    return a.take(is_read), b.take(is_read), counts


# ------------------------------------------------------------------------------------------------------ the differences
def _measure_changes(
    measures: Sequence[WeightedMetrics], split: str, images: int, resamples: int
) -> tuple[list[str], list[MetricChange]]:
    """Return the names of the M metrics, and M + K changes: of the metrics, then of the AP of the K labels.

    `measures` compute the metrics of run a and of run b. `images` is the number of images.
    """

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
    """Return the at most CHANGED_IMAGES images whose probabilities changed most, sorted by decreasing change.

    The change of an image is the mean of |b − a| over its known labels. Images without a change are left out. Ties are
    broken by the order of the images. `a` and `b` have the scores of the same N readable images and K labels.
    """
    known, images = truth.valid, []
    distances = np.where(known, np.abs(b.scores - a.scores), 0.0)
    changes = distances.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    for row in np.argsort(-changes, kind="stable")[:CHANGED_IMAGES]:
        positive, distance = truth.positive[row], distances[row]
        moves = tuple(
            ScoreChange(labels[k], bool(positive[k]), float(a.scores[row, k]), float(b.scores[row, k]))
            for k in np.argsort(-distance, kind="stable")[:_MOVES]
            if distance[k] > 0
        )
        present = tuple(labels[k] for k in np.flatnonzero(positive & known[row]))
        if moves:
            images.append(ChangedImage(str(a.ids[row]), float(changes[row]), present, moves))
    return tuple(images)


# --------------------------------------------------------------------------------------------------------- the command
def compare_folders(a: RunFolder, b: RunFolder, *, split: str | None = None, output: str | None = None) -> Outcome:
    """Compare two runs on one split, and return a heading, a table of changes, and a table of the most changed images.

    `split` is the name of the split; None = the result of `first_shared_split`. `output` is the path of a CSV file for
    all changes, as fractions; None = no file. Raises UserError if `a` and `b` are the same folder, or under the
    conditions of `compare_runs`.
    """
    if a.path == b.path:
        raise UserError(f"both --workdir are {a}; give the folders of two runs")
    comparison = compare_runs(StoredRun(a), StoredRun(b), split=split)
    changes = _change_rows(comparison)
    if output:
        with open_output(OutputTarget(epath.Path(output), "csv")) as file:
            file.write(Table(_COLUMNS, changes).csv())
        status(f"written to {output}")
    shown = Table(_COLUMNS, changes[: len(comparison.metrics) + _SHOWN], notes=["* the interval excludes 0"])
    parts = (_heading(comparison), shown, _image_table(comparison.changed[:_SHOWN]))
    return Outcome(parts, {comparison.split: asdict(comparison) | comparison.counts})


_COLUMNS = (
    "metric",
    *(Column(run, percent) for run in ("a", "b")),
    *(Column(name, partial(percent, sign="+")) for name in ("difference", "low", "high")),
    Column("clear", lambda clear: "*" if clear else ""),
)


def _change_rows(comparison: Comparison) -> list[list[str | float | bool]]:
    """Return the rows of the table of changes: the metrics, then the AP of each label by decreasing |b − a|."""
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
