"""What `--mode=reproduce` shows and writes: published numbers, ours, and their difference, as tables and a figure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from mlmoe_jax.apps.papers.paper import Row, as_text
from mlmoe_jax.apps.papers.reproduce.commands import Request
from mlmoe_jax.apps.papers.reproduce.measure import COSTS, Outcome
from mlmoe_jax.apps.papers.sweep.plot import Line, draw
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.text import text_table

_WIDTH = 120
_UNCERTAIN = "?"  # after a published number that was not simply read
_CSV = (
    *("row", "column", "metric", "published", "uncertain", "ours", "standard_deviation", "seeds", "difference"),
    *("caveats", "run", "config"),
)


# ----------------------------------------------------------------------------------------------- text and Markdown
def format_text(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the table for the terminal, with the caveats below it."""
    table = _table(request, outcomes)
    columns = max(map(len, table))
    lines = [_heading(request), "", text_table(table, align="<<" + ">" * (columns - 3) + "<"), ""]
    notes = [
        textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for line in _notes(request, outcomes)
    ]
    return "\n".join([*lines, *notes])


def format_markdown(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown."""
    head, *rows = _table(request, outcomes)
    rule = ["---", "---", *["---:"] * (len(head) - 3), "---"]
    filled = [row if len(row) == len(head) else [*row, *[""] * (len(head) - len(row))] for row in rows]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, rule, *filled)]
    notes = [f"* {line}" if line else "" for line in _notes(request, outcomes)]
    return "\n".join([f"# {_heading(request)}", "", *body, "", *notes, ""])


def _heading(request: Request) -> str:
    on = f", on {request.dataset} instead of the published data" if request.dataset else ""
    return f"{request.paper.name}, {request.result.title}{on}"


def _table(request: Request, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return head and rows: up to three lines per row of the paper, published, ours and their difference."""
    result, numbers = request.result, _note_numbers(request, outcomes)
    table = [["", "", *result.columns, "caveats"]]
    for outcome in outcomes:
        row = outcome.row
        marks = ",".join(map(str, sorted(numbers[note] for note in _own_notes(row))))
        if not result.columns:  # images, not numbers
            table.append([row.label, outcome.state, marks])
            continue
        table.append([row.label, "published", *(_published(request, row, column) for column in result.columns), marks])
        if not outcome.ours:
            table.append(["", "ours", outcome.state])
            continue
        table.append(["", "ours", *(_ours(outcome, column) for column in result.columns), outcome.state])
        if not request.dataset:
            cells = (as_text(outcome.difference(column), sign="+") for column in result.columns)
            table.append(["", "difference", *cells, ""])
    return table


def _published(request: Request, row: Row, column: str) -> str:
    number = row.numbers[column]
    certain = number.value is None or request.paper.certain(number, row, request.result)
    return as_text(number.value) + ("" if certain else _UNCERTAIN)


def _ours(outcome: Outcome, column: str) -> str:
    value, spread = outcome.ours.get(column), outcome.spread.get(column)
    text = "–" if value is None or math.isnan(value) else f"{value:.4g}" if column in COSTS else f"{value:.2f}"
    return f"{text} ± {spread:.2f}" if spread is not None else text


def _own_notes(row: Row) -> list[str]:
    """Return the ids of the notes of a row and its numbers."""
    return list(dict.fromkeys([*row.notes, *(note for number in row.numbers.values() for note in number.notes)]))


def _note_numbers(request: Request, outcomes: Sequence[Outcome]) -> dict[str, int]:
    notes = [*request.result.notes, *(note for outcome in outcomes for note in _own_notes(outcome.row))]
    return {note: number for number, note in enumerate(dict.fromkeys(notes), start=1)}


def _notes(request: Request, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the numbered caveats, those of the whole table first."""
    numbers, everywhere = _note_numbers(request, outcomes), len(request.result.notes)
    lines = []
    if everywhere:
        lines.append("Why the published numbers and ours may differ, in all rows:")
    for note, number in numbers.items():
        if number == everywhere + 1:
            lines.append("In the rows that name them:")
        lines.append(f"[{number}] {request.paper.notes[note]}")
    used = sorted({outcome.row.evaluator for outcome in outcomes})
    if any(metric in ("mAP", "CF1") for metric in request.result.columns):
        lines.append(f"Our metrics are computed as by the evaluator of {', '.join(used)} (see metrics.preset).")
    if any(not request.paper.certain(n, o.row, request.result) for o in outcomes for n in o.row.numbers.values()):
        lines.append(f"{_UNCERTAIN} marks a published number that could not simply be read; – is one that is missing.")
    return lines


# ------------------------------------------------------------------------------------------------------ CSV and JSON
def listed(request: Request, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one entry per number, with the keys of the CSV file and the settings of its row."""
    entries = []
    for outcome in outcomes:
        row = outcome.row
        runs = request.runs_of(row.recipe)
        for column, number in row.numbers.items():
            notes = dict.fromkeys([*number.notes, *row.notes, *request.result.notes])
            metric = row.metrics.get(column, column)
            values = (
                *(row.label, column, f"{row.evaluator}/{metric}", number.value),
                not request.paper.certain(number, row, request.result),
                *(outcome.ours.get(column), outcome.spread.get(column), outcome.seeds, outcome.difference(column)),
                *(" ".join(notes), " ".join(run.name for run in runs), row.recipe.reference if row.recipe else ""),
            )
            entries.append({"table": request.result.id, **dict(zip(_CSV, values, strict=True))})
    return entries


def write_tables(request: Request, outcomes: Sequence[Outcome], folder: RunFolder) -> None:
    """Write TABLE.csv and TABLE.md, such as mlvpt.1.csv."""
    entries = listed(request, outcomes)
    folder.write_csv(f"{request.name}.csv", ["table", *_CSV], [_plain(entry) for entry in entries])
    folder.write_text(f"{request.name}.md", format_markdown(request, outcomes))


def _plain(entry: dict[str, Any]) -> list[Any]:
    missing = (None, "")
    return ["" if value in missing or value != value else value for value in entry.values()]


# -------------------------------------------------------------------------------------------------------- the figure
def figure(request: Request, outcomes: Sequence[Outcome]) -> bytes | None:
    """Draw a figure of the paper with the published points and ours, as PNG; None if there is nothing to draw.

    There is one panel per metric, such as mAP, CF1 and OF1, over the axis of the figure, and one line per data set. If
    the axis is the labels, the columns of the rows are its points.
    """
    result = request.result
    if result.x == "label":
        places = [column.removeprefix("AP ") for column in result.columns]
        panels = {"AP": _over_labels(outcomes, places)}
    else:
        drawn = [outcome for outcome in outcomes if outcome.row.over is None]
        places = list(dict.fromkeys(outcome.row.x for outcome in drawn))
        panels = {column: _over_rows(request, drawn, column) for column in result.columns}
    panels = {heading: lines for heading, lines in panels.items() if lines}
    if not panels or not places:
        return None
    x_label = {"label": "label", "method": "method"}.get(result.x, result.x.rpartition(".")[2])
    return draw(panels, places, x_label=x_label, y_label="%", legend="", title=_heading(request))


def _over_labels(outcomes: Sequence[Outcome], places: Sequence[str]) -> list[Line]:
    lines = []
    for outcome in outcomes:
        published = [number.value for number in outcome.row.numbers.values()]
        ours = [outcome.ours.get(column, math.nan) for column in outcome.row.numbers]
        for source, values in (("published", published), ("ours", ours)):
            kept = [(x, y, 0.0) for x, y in zip(places, values, strict=True) if y is not None and not math.isnan(y)]
            if kept:
                lines.append(Line(f"{outcome.row.settings['method']}, {source}", *zip(*kept, strict=True)))
    return lines


def _over_rows(request: Request, outcomes: Sequence[Outcome], column: str) -> list[Line]:
    points: dict[str, list[tuple[Any, float, float]]] = {}
    for outcome in outcomes:
        row = outcome.row
        of = row.settings["dataset"]
        found = {f"{of}, published": (row.numbers[column].value, 0.0)}
        found[f"{request.dataset or of}, ours"] = outcome.ours.get(column), outcome.spread.get(column, 0.0)
        for label, (value, spread) in found.items():
            point = (row.x, value, spread)
            if value is not None and not math.isnan(value) and point not in points.setdefault(label, []):
                points[label].append(point)
    return [Line(label, *zip(*found, strict=True)) for label, found in points.items() if found]
