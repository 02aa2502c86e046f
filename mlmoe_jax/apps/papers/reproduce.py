"""`mlmoe reproduce`: train the runs of a published table that are missing, and compare all with the paper.

    mlmoe reproduce --table=mlvpt.4 --root=/data/coco
    mlmoe reproduce --table=drmoe.1 --dataset=digits

All tables share one folder, which has a run folder for each run. A finished run is not trained again; its results are
read. Several processes can train the runs of the folder at the same time, see `grid`. The resulting table has the
published numbers, the numbers of this package, and the differences. It is printed, and written as Markdown and as CSV.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from mlmoe_jax.apps.papers.grid import GridPoint, plan_runs, train_missing
from mlmoe_jax.apps.papers.paper import DASH, MISSING, UNCERTAIN, PublishedRow, Recipe, number_text
from mlmoe_jax.apps.papers.request import Request, commands_after
from mlmoe_jax.apps.tools.preflight.cost import count_cost
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.metrics import published
from mlmoe_jax.evaluation.metrics.multilabel import sample_deviation
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import RunFolder, read_label_space
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.training.resume import changed_keys

# Columns that require no training -> part of `count_cost`, key, unit.
COSTS = {
    "total, M": ("params", "total", 1e6),
    "trainable, M": ("params", "trainable", 1e6),
    "FLOPs, G": ("macs", "layers", 1e9),
}
_PAIR = re.compile(r"p\((.+) \| (.+)\)")  # share of the first label among training images with the second label


def reproduce(request: Request, folder: RunFolder) -> Outcome:
    """Train the missing runs of a table, write its CSV and Markdown files to `folder`, and return the table to print.

    The printed table has the requested rows. The files have all rows of the table: a row that was not requested has
    numbers if its runs are finished. Raises UserError before the first training, under the conditions of `plan_runs`.
    """
    points = [GridPoint(run.name, {}, request.load_config(run)) for run in request.runs]
    runs, measurements = plan_runs(points, folder), Measurements(request, folder)

    def write() -> None:
        write_tables(request, measurements.measure_rows(request.table.rows), folder)

    exit_code = train_missing(runs, folder, write)
    measured = measurements.measure_rows(request.rows)
    for command in commands_after(request, str(folder)):
        status(f"the figure itself: {command}")
    document = numbers_table(request, measured).values()
    return Outcome([comparison_table(request, measured)], document, exit_code)


# ----------------------------------------------------------------------------------------------------- measurements
@dataclass(frozen=True)
class RowNumbers:
    """The numbers that this package measured for a row of a published table.

    Attributes:
      ours: column -> mean over seeds; nan if undefined. Columns without a finished run are missing.
      spread: column -> sample standard deviation over seeds, without the columns of COSTS; {} for one seed.
      state: a remark that explains missing numbers; "" if none is missing.
      seeds: the number of finished runs, one per seed.
    """

    row: PublishedRow
    ours: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    state: str = ""
    seeds: int = 0

    def difference(self, column: str) -> float:
        """Return the number of this package minus the published number of a column; nan if a number is missing."""
        value = self.row.numbers[column].value
        return self.ours.get(column, math.nan) - (math.nan if value is None else value)


class Measurements:
    """Computes the numbers of table rows from the run folders below `folder`. Results are cached by run."""

    def __init__(self, request: Request, folder: RunFolder):
        self._request, self._folder = request, folder
        self._metrics, self._cost, self._fits = cache(self._metrics), cache(self._cost), cache(self._fits)

    def measure_rows(self, rows: Sequence[PublishedRow]) -> list[RowNumbers]:
        """Return the numbers of the given rows. Unfinished runs have no numbers except parameters and FLOPs."""
        return [self._measure_row(row) for row in rows]

    def _measure_row(self, row: PublishedRow) -> RowNumbers:
        if row.recipe is None:
            return RowNumbers(row, state="this package does not have it")
        runs = self._request.repeat(row.recipe)
        measured = [self._measure_run(run, row) for run in runs]
        if row.subtracted is not None:
            others = (self._measure_run(run, row) for run in self._request.repeat(row.subtracted))
            measured = list(map(_subtract, measured, others))
        values = {column: [one[column] for one in measured if column in one] for column in row.numbers}
        ours = {column: float(np.mean(found)) for column, found in values.items() if found}
        repeated = (column for column in ours.keys() - COSTS.keys() if len(values[column]) > 1)
        spread = {column: sample_deviation(values[column]) for column in repeated}
        finished = sum(map(self._is_finished, runs))
        state = "" if finished and ours.keys() == row.numbers.keys() else MISSING
        return RowNumbers(row, ours, spread, state, finished)

    def _measure_run(self, run: Recipe, row: PublishedRow) -> dict[str, float]:
        """Return column -> number of one run. An unfinished run only has numbers for the columns of COSTS."""
        values = dict(self._cost(run)) if COSTS.keys() & row.numbers.keys() else {}
        if self._is_finished(run):
            metrics, space = self._metrics(run, row.evaluator)
            for column in row.numbers.keys() - COSTS.keys():
                values[column] = _select_metric(row.metrics.get(column, column), metrics, space)
        return values

    def _is_finished(self, run: Recipe) -> bool:
        return StoredRun(self._folder.below(run.name)).final_metrics is not None and self._fits(run)

    def _fits(self, run: Recipe) -> bool:
        """Return whether the run folder of a run has the config of this request; if not, print the differences."""
        if changed := changed_keys(self._request.load_config(run), self._folder.below(run.name)):
            status(f"{run.name} is not in the table, because it was trained differently: {'; '.join(changed)}")
        return not changed

    def _metrics(self, run: Recipe, evaluator: str) -> tuple[dict[str, float], LabelSpace]:
        """Return metrics of a finished run on its first test split (name -> percent), and its label space.

        The metrics are defined by `evaluator`, and include the AP of each label with the name `AP LABEL`.
        """
        stored = StoredRun(self._folder.below(run.name))
        scored = stored.split(stored.config.data.test_splits[0]).readable()
        space = read_label_space(stored.folder)
        metrics = published.preset(evaluator, scored.scores, scored.codes, frequency=space.frequency)
        per_label = published.average_precisions(evaluator, scored.scores, scored.codes)
        metrics |= {f"AP {name}": value for name, value in zip(space.names, per_label, strict=True)}
        return {name: 100 * value for name, value in metrics.items()}, space

    def _cost(self, run: Recipe) -> dict[str, float]:
        counts = count_cost(self._request.load_config(run))
        return {name: counts[part][key] / unit for name, (part, key, unit) in COSTS.items()}


def _subtract(values: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    return {column: values[column] - others[column] for column in values.keys() & others.keys()}


def _select_metric(column: str, metrics: dict[str, float], space: LabelSpace) -> float:
    """Return the value of a column in percent; nan if the data set lacks a label that the column names.

    The column is the name of a metric, `AP LABEL`, or `p(LABEL | LABEL)`, the share of the first label among the
    training images with the second label.
    """
    if pair := _PAIR.fullmatch(column):
        if not set(pair.groups()) <= set(space.names):
            return math.nan
        first, second = map(space.names.index, pair.groups())
        return float(space.counts[first, second] / space.positives[second])
    return metrics.get(column, math.nan) if column.startswith("AP ") else metrics[column]


# ----------------------------------------------------------------------------------------------------------- tables
def comparison_table(request: Request, measured: Sequence[RowNumbers]) -> Table:
    """Return a table with three lines per row: published numbers, numbers of this package, and differences.

    The line of differences is left out if this package has no number, or if the request sets another data set. The
    caveats are the notes of the table.
    """
    columns, rows = request.table.columns, []
    for one in measured:
        marks = request.paper.marks(one.row.all_notes)
        rows.append([one.row.label, "published", *map(str, one.row.numbers.values()), marks])
        rows.append(["", "ours", *(_own_number(one, column) for column in columns), one.state])
        if one.ours and not request.dataset:
            differences = [number_text(one.difference(column), sign="+") for column in columns]
            rows.append(["", "difference", *differences, ""])
    texts = Column("", align="<")
    heading = [texts, texts, *map(Column, columns), Column("caveats", align="<")]
    on = f", on {request.dataset} instead of the published data" if request.dataset else ""
    return Table(heading, rows, f"{request.paper.name}, {request.table.title}{on}", _notes(request, measured))


def _own_number(measured: RowNumbers, column: str) -> str:
    value, spread = measured.ours.get(column), measured.spread.get(column)
    if value is None or math.isnan(value):
        return DASH
    if column in COSTS:
        return f"{value:.4g}"
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def _notes(request: Request, measured: Sequence[RowNumbers]) -> list[str]:
    """Return general remarks, and the readings and caveats of the rows with their numbers in docs/published.md."""
    paper = request.paper
    used = {*request.table.notes, *(note for one in measured for note in one.row.all_notes)}
    evaluators = ", ".join(sorted({one.row.evaluator for one in measured}))
    return [
        f"Our metrics are computed as by the evaluator of {evaluators} (see metrics.preset).",
        f"{UNCERTAIN} marks a published number that is not simply printed, {DASH} a missing number.",
        "Why the published numbers and ours may differ:",
        *(f"[{paper.numbers[note]}] {text}" for note, text in paper.notes.items() if note in used),
    ]


NUMBER_COLUMNS = (
    "table",
    "row",
    "column",
    "metric",
    "published",
    "uncertain",
    "ours",
    "standard_deviation",
    "seeds",
    "difference",
    "caveats",
    "run",
    "config",
)


def numbers_table(request: Request, measured: Sequence[RowNumbers]) -> Table:
    """Return a table with one row per published number and the columns NUMBER_COLUMNS, for --json and the CSV file."""
    rows = [
        [
            request.table.id,
            one.row.label,
            column,
            f"{one.row.evaluator}/{one.row.metrics.get(column, column)}",
            number.value,
            not number.certain,
            one.ours.get(column),
            one.spread.get(column),
            one.seeds,
            one.difference(column),
            " ".join(dict.fromkeys([*number.notes, *one.row.notes, *request.table.notes])),
            " ".join(run.name for run in request.repeat(one.row.recipe)),
            one.row.recipe.reference if one.row.recipe else "",
        ]
        for one in measured
        for column, number in one.row.numbers.items()
    ]
    return Table(NUMBER_COLUMNS, rows)


def write_tables(request: Request, measured: Sequence[RowNumbers], folder: RunFolder) -> None:
    """Write the table to `folder` as Markdown, such as mlvpt.1.md. If the table has columns, also write a CSV."""
    folder.write_text(f"{request.name}.md", comparison_table(request, measured).markdown())
    if request.table.columns:  # a figure may have images instead of numbers
        folder.write_text(f"{request.name}.csv", numbers_table(request, measured).csv())
