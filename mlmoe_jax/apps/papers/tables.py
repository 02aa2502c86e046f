"""A reproduced table as text, Markdown, CSV and JSON: published numbers, ours, and their difference."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from mlmoe_jax.apps.papers.measure import COSTS, Outcome
from mlmoe_jax.apps.papers.paper import UNCERTAIN, as_text, markdown_table
from mlmoe_jax.apps.papers.request import Request
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.text import text_table

_WIDTH = 120
_CSV = (
    *("table", "row", "column", "metric", "published", "uncertain", "ours", "standard_deviation", "seeds"),
    *("difference", "caveats", "run", "config"),
)


def format_text(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the table for the terminal, with the caveats below it."""
    table = _table(request, outcomes)
    notes = [
        textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for line in _notes(request, outcomes)
    ]
    aligned = text_table(table, align="<<" + ">" * (len(table[0]) - 3) + "<")
    return "\n".join([heading(request), "", aligned, "", *notes])


def format_markdown(request: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown."""
    head, *rows = _table(request, outcomes)
    filled = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    table = markdown_table([head, *filled], ["---", "---", *["---:"] * (len(head) - 3), "---"])
    notes = [f"* {line}" for line in _notes(request, outcomes)]
    return "\n".join([f"# {heading(request)}", "", *table, "", *notes, ""])


def heading(request: Request) -> str:
    """Return the title of the table, with the data set if it is not the published one."""
    on = f", on {request.dataset} instead of the published data" if request.dataset else ""
    return f"{request.paper.name}, {request.result.title}{on}"


def _table(request: Request, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return head and rows: up to three lines per row of the paper, published, ours and their difference."""
    result, numbers = request.result, _note_numbers(request, outcomes)
    table = [["", "", *result.columns, "caveats"]]
    for outcome in outcomes:
        row = outcome.row
        marks = ",".join(map(str, sorted(numbers[note] for note in row.all_notes)))
        if not result.columns:  # images, not numbers
            table.append([row.label, outcome.state, marks])
            continue
        published = (request.paper.printed(number, row, result) for number in row.numbers.values())
        table.append([row.label, "published", *published, marks])
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


def _note_numbers(request: Request, outcomes: Sequence[Outcome]) -> dict[str, int]:
    notes = [*request.result.notes, *(note for outcome in outcomes for note in outcome.row.all_notes)]
    return {note: number for number, note in enumerate(dict.fromkeys(notes), start=1)}


def _notes(request: Request, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the numbered caveats; caveats of the whole table come first."""
    result, lines = request.result, []
    for note, number in _note_numbers(request, outcomes).items():
        if number == 1 and result.notes:
            lines.append("Why the published numbers and ours may differ, in all rows:")
        if number == len(result.notes) + 1:
            lines.append("In the rows that name them:")
        lines.append(f"[{number}] {request.paper.notes[note]}")
    if {"mAP", "CF1"} & set(result.columns):
        used = ", ".join(sorted({outcome.row.evaluator for outcome in outcomes}))
        lines.append(f"Our metrics are computed as by the evaluator of {used} (see metrics.preset).")
    if any(not request.paper.certain(n, o.row, result) for o in outcomes for n in o.row.numbers.values()):
        lines.append(f"{UNCERTAIN} marks a published number that could not simply be read; – is one that is missing.")
    return lines


def listed(request: Request, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one entry per number, with the columns of the CSV file; it is the output of --json."""
    entries = []
    for outcome in outcomes:
        row, runs = outcome.row, request.runs_of(outcome.row.recipe)
        for column, number in row.numbers.items():
            values = (
                *(request.result.id, row.label, column, f"{row.evaluator}/{row.metrics.get(column, column)}"),
                *(number.value, not request.paper.certain(number, row, request.result)),
                *(outcome.ours.get(column), outcome.spread.get(column), outcome.seeds, outcome.difference(column)),
                " ".join(dict.fromkeys([*number.notes, *row.notes, *request.result.notes])),
                *(" ".join(run.name for run in runs), row.recipe.reference if row.recipe else ""),
            )
            entries.append(dict(zip(_CSV, values, strict=True)))
    return entries


def write_tables(request: Request, outcomes: Sequence[Outcome], folder: RunFolder) -> None:
    """Write TABLE.csv and TABLE.md, such as mlvpt.1.csv."""
    rows = [
        ["" if value is None or value != value else value for value in entry.values()]
        for entry in listed(request, outcomes)
    ]
    folder.write_csv(f"{request.name}.csv", _CSV, rows)
    folder.write_text(f"{request.name}.md", format_markdown(request, outcomes))
