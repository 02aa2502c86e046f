"""`--mode=reproduce`: train the runs of a published table that are missing, and compare all with the paper.

    --mode=reproduce --table=mlvpt.4 --root=/data/coco
    --mode=reproduce --table=drmoe.1 --dataset=digits

All tables share one folder, with a run folder per run. A finished run is read, and not trained again. Several processes
can work on the folder at the same time, see `grid`. A table is printed and written as Markdown and CSV: published
numbers, numbers of this package, and their difference.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers.grid import Point, execute, plan_runs
from mlmoe_jax.apps.papers.paper import MISSING, UNCERTAIN, Recipe, Row, as_text, markdown_table
from mlmoe_jax.apps.papers.plot import Mark, draw
from mlmoe_jax.apps.papers.request import Request, commands_after
from mlmoe_jax.apps.tools.preflight.cost import count_cost
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.metrics import published
from mlmoe_jax.evaluation.metrics.multilabel import sample_deviation
from mlmoe_jax.evaluation.results import read_scores, require_split, training_results
from mlmoe_jax.runs.folder import RunFolder, read_config, read_label_space
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import text_table
from mlmoe_jax.training.resume import changed_keys

_WIDTH = 120
# Columns that require no training -> part of `count_cost`, key, unit.
COSTS = {
    "total, M": ("params", "total", 1e6),
    "trainable, M": ("params", "trainable", 1e6),
    "FLOPs, G": ("macs", "layers", 1e9),
}
_PAIR = re.compile(r"p\((.+) \| (.+)\)")  # share of the first label among training images with the second label


def reproduce(request: Request, folder: RunFolder, *, as_json: bool = False) -> int:
    """Train the missing runs of a table, write its CSV, Markdown and figure to `folder`, and print it.

    Files have all rows of the table. Rows that were not requested have the numbers of finished runs.

    Returns the exit code of `execute`. Raises UserError as `plan_runs` does, before the first run, and as `execute`
    does.
    """
    points = [
        Point(run.name, {}, configuration.load_config(run.reference, request.overrides_of(run))) for run in request.runs
    ]
    runs, measurements = plan_runs(points, folder), Measurements(request, folder)

    def all_rows() -> list[Outcome]:
        return [measurements.outcome(row) for row in request.result.rows]

    def finish() -> None:
        image = figure(request, all_rows()) if request.result.x else None
        if image is not None:
            with folder.writing(wait=True):
                folder.write_bytes(f"{request.name}.png", image)
        outcomes = [measurements.outcome(row) for row in request.rows]
        print(to_json(list_numbers(request, outcomes), indent=2) if as_json else format_text(request, outcomes))
        for command in commands_after(request, str(folder)):
            status(f"the figure itself: {command}")

    return execute(runs, folder, lambda: write_tables(request, all_rows(), folder), finish)


# ----------------------------------------------------------------------------------------------------- measurements
@dataclass(frozen=True)
class Outcome:
    """The numbers of a row: mean over seeds (nan if undefined), sample deviation, and a remark, `state`."""

    row: Row
    ours: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)  # {} for one seed
    state: str = ""
    seeds: int = 0  # number of finished runs

    def difference(self, column: str) -> float:
        """The number of this package minus the published number; nan if one is missing."""
        value = self.row.numbers[column].value
        return self.ours.get(column, math.nan) - (math.nan if value is None else value)


class Measurements:
    """The numbers of all rows of a request. The numbers of a run are computed once."""

    def __init__(self, request: Request, folder: RunFolder):
        self._request, self._folder = request, folder
        self._metrics, self._cost, self._fits = cache(self._metrics), cache(self._cost), cache(self._fits)

    def outcome(self, row: Row) -> Outcome:
        """Return the numbers of a row that can be computed now."""
        if row.recipe is None:
            return Outcome(row, state="this package does not have it")
        runs = self._request.runs_of(row.recipe)
        measured = [self._columns(run, row) for run in runs]
        if row.over is not None:
            others = [self._columns(run, row) for run in self._request.runs_of(row.over)]
            measured = [
                {column: one[column] - other[column] for column in one.keys() & other.keys()}
                for one, other in zip(measured, others, strict=True)
            ]
        values = {column: [one[column] for one in measured if column in one] for column in row.numbers}
        ours = {column: float(np.mean(numbers)) for column, numbers in values.items() if numbers}
        repeated = {column: numbers for column, numbers in values.items() if len(numbers) > 1 and column not in COSTS}
        spread = {column: sample_deviation(numbers) for column, numbers in repeated.items()}
        finished = sum(map(self._is_finished, runs))
        if row.numbers:
            state = MISSING if row.numbers.keys() - ours.keys() else ""
        else:
            state = "trained" if finished == len(runs) else "not trained"
        return Outcome(row, ours, spread, state, finished)

    def _columns(self, run: Recipe, row: Row) -> dict[str, float]:
        """Return the columns of a row for one run; before it is finished, only columns that require no training."""
        values = dict(self._cost(run)) if COSTS.keys() & row.numbers.keys() else {}
        if self._is_finished(run):
            metrics, space = self._metrics(run, row.evaluator)
            for column in row.numbers.keys() - COSTS.keys():
                values[column] = _value(row.metrics.get(column, column), metrics, space)
        return values

    def _is_finished(self, run: Recipe) -> bool:
        return training_results(self._folder.below(run.name)) is not None and self._fits(run)

    def _fits(self, run: Recipe) -> bool:
        """Return whether a run was trained with the keys of this request; print a line if not."""
        config = configuration.load_config(run.reference, self._request.overrides_of(run))
        if changed := changed_keys(config, self._folder.below(run.name)):
            status(f"{run.name} is not in the table, because it was trained differently: {'; '.join(changed)}")
        return not changed

    def _metrics(self, run: Recipe, evaluator: str) -> tuple[dict[str, float], LabelSpace]:
        """Return metric -> percent of a finished run on its first test split, and its label space."""
        folder = self._folder.below(run.name)
        scored = require_split(folder, read_scores(folder), read_config(folder).data.test_splits[0]).readable()
        space = read_label_space(folder)
        metrics = published.preset(evaluator, scored.scores, scored.codes, frequency=space.frequency)
        per_label = published.average_precisions(evaluator, scored.scores, scored.codes)
        metrics |= {f"AP {name}": value for name, value in zip(space.names, per_label, strict=True)}
        return {name: 100 * value for name, value in metrics.items()}, space

    def _cost(self, run: Recipe) -> dict[str, float]:
        counts = count_cost(configuration.load_config(run.reference, self._request.overrides_of(run)))
        return {name: counts[part][key] / unit for name, (part, key, unit) in COSTS.items()}


def _value(column: str, metrics: dict[str, float], space: LabelSpace) -> float:
    """Return a metric in percent, or the share of a pair of labels; nan if the data set lacks the labels."""
    if pair := _PAIR.fullmatch(column):
        if not set(pair.groups()) <= set(space.names):
            return math.nan
        first, second = map(space.names.index, pair.groups())
        return float(space.counts[first, second] / space.positives[second])
    return metrics.get(column, math.nan) if column.startswith("AP ") else metrics[column]


# ----------------------------------------------------------------------------------------------------------- tables
def format_text(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the table for the terminal, with the caveats below it."""
    table = _table(request, outcomes)
    notes = [
        textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for line in _notes(request, outcomes)
    ]
    aligned = text_table(table, align="<<" + ">" * (len(table[0]) - 3) + "<")
    return "\n".join([_heading(request), "", aligned, "", *notes])


def format_markdown(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown."""
    head, *rows = _table(request, outcomes)
    filled = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    table = markdown_table([head, *filled], ["---", "---", *["---:"] * (len(head) - 3), "---"])
    notes = [f"* {line}" for line in _notes(request, outcomes)]
    return "\n".join([f"# {_heading(request)}", "", *table, "", *notes, ""])


def _heading(request: Request) -> str:
    on = f", on {request.dataset} instead of the published data" if request.dataset else ""
    return f"{request.paper.name}, {request.result.title}{on}"


def _table(request: Request, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return head and rows: up to three lines per row of the paper, published, ours and the difference."""
    result = request.result
    table = [["", "", *result.columns, "caveats"]]
    for outcome in outcomes:
        row = outcome.row
        marks = request.paper.marks(row.all_notes)
        if not result.columns:  # images, not numbers
            table.append([row.label, outcome.state, marks])
            continue
        table.append([row.label, "published", *map(str, row.numbers.values()), marks])
        ours = [_ours(outcome, column) for column in result.columns] if outcome.ours else []
        table.append(["", "ours", *ours, outcome.state])
        if ours and not request.dataset:
            differences = (as_text(outcome.difference(column), sign="+") for column in result.columns)
            table.append(["", "difference", *differences, ""])
    return table


def _ours(outcome: Outcome, column: str) -> str:
    value, spread = outcome.ours.get(column), outcome.spread.get(column)
    text = "–" if value is None or math.isnan(value) else f"{value:.4g}" if column in COSTS else f"{value:.2f}"
    return f"{text} ± {spread:.2f}" if spread is not None else text


def _notes(request: Request, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the caveats with their numbers, which are the numbers in docs/results.md, of the whole table first."""
    paper, everywhere = request.paper, request.result.notes
    row_notes = {note for outcome in outcomes for note in outcome.row.all_notes} - set(everywhere)
    lines = []
    for title, notes in (("in all rows", everywhere), ("in the rows that name them", row_notes)):
        if notes:
            lines.append(f"Why the published numbers and ours may differ, {title}:")
            lines += [f"[{paper.numbers[note]}] {text}" for note, text in paper.notes.items() if note in notes]
    if {"mAP", "CF1"} & set(request.result.columns):
        used = ", ".join(sorted({outcome.row.evaluator for outcome in outcomes}))
        lines.append(f"Our metrics are computed as by the evaluator of {used} (see metrics.preset).")
    if not all(number.certain for outcome in outcomes for number in outcome.row.numbers.values()):
        lines.append(
            f"{UNCERTAIN} marks an uncertain published number, which is not simply printed; – is a missing number."
        )
    return lines


def list_numbers(request: Request, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one entry per number, for --json and as rows of the CSV file."""
    return [
        {
            "table": request.result.id,
            "row": row.label,
            "column": column,
            "metric": f"{row.evaluator}/{row.metrics.get(column, column)}",
            "published": number.value,
            "uncertain": not number.certain,
            "ours": outcome.ours.get(column),
            "standard_deviation": outcome.spread.get(column),
            "seeds": outcome.seeds,
            "difference": outcome.difference(column),
            "caveats": " ".join(dict.fromkeys([*number.notes, *row.notes, *request.result.notes])),
            "run": " ".join(run.name for run in request.runs_of(row.recipe)),
            "config": row.recipe.reference if row.recipe else "",
        }
        for outcome in outcomes
        for row in [outcome.row]
        for column, number in row.numbers.items()
    ]


def write_tables(request: Request, outcomes: Sequence[Outcome], folder: RunFolder) -> None:
    """Write TABLE.csv, if there are numbers, and TABLE.md, such as mlvpt.1.csv."""
    entries = list_numbers(request, outcomes)
    if entries:  # a figure may have images instead of numbers
        folder.write_csv(f"{request.name}.csv", list(entries[0]), [list(entry.values()) for entry in entries])
    folder.write_text(f"{request.name}.md", format_markdown(request, outcomes))


# ----------------------------------------------------------------------------------------------------------- figure
def figure(request: Request, outcomes: Sequence[Outcome]) -> bytes | None:
    """Draw a figure of the paper with published and own points, as PNG; None if there is nothing to draw.

    There is one panel per metric, such as mAP, CF1 and OF1, over the axis of the figure, and one line per data set. If
    the axis is the labels, the columns of the rows are its points.
    """
    marks = list(_marks(request, outcomes))
    if all(math.isnan(mark.y) for mark in marks):
        return None
    return draw(marks, x_label=request.result.x.rpartition(".")[2], y_label="%", title=_heading(request))


def _marks(request: Request, outcomes: Sequence[Outcome]) -> Iterator[Mark]:
    over_labels = request.result.x == "label"
    for outcome in outcomes:
        row = outcome.row
        if row.over is not None and not over_labels:
            continue
        for column, number in row.numbers.items():
            panel, x = ("AP", column.removeprefix("AP ")) if over_labels else (column, row.x)
            line = row.settings["method" if over_labels else "dataset"]
            here = line if over_labels else request.dataset or line
            yield Mark(panel, f"{line}, published", x, math.nan if number.value is None else number.value)
            ours, spread = outcome.ours.get(column, math.nan), outcome.spread.get(column, 0.0)
            yield Mark(panel, f"{here}, ours", x, ours, spread)
