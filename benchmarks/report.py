"""What benchmarks print and store: tables, numbers over seeds, files of results, and tables in pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Column, Table

ROOT = Path(__file__).resolve().parents[1]
CONFIDENCE = 0.95


def progress(text: str) -> None:
    """Print what happens now; results are printed to the standard output."""
    print(text, file=sys.stderr, flush=True)


def heading(*columns: Column | str) -> str:
    """Return the heading of a Markdown table whose rows follow when they are there."""
    return Table(columns, []).markdown().rstrip()


def row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def left(name: str) -> Column:
    """Return a column that is aligned to the left, as the first is."""
    return Column(name, align="<")


def over_seeds(values: Sequence[float]) -> str:
    """Return the mean of fractions in percent, and of several their sample standard deviation."""
    spread = f" ± {100 * np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.2f}{spread}"


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of several values, and half of its interval by Student's t."""
    half = stats.sem(values) * stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    return float(np.mean(values)), float(half)


def publish(path: Path, results: Any, table: str = "") -> str:
    """Write PATH.json and, with a table, PATH.md; return the table."""
    folder = Folder(path.parent)
    folder.write_text(f"{path.name}.json", json.dumps(results, indent=1))
    if table:
        folder.write_text(f"{path.name}.md", table)
    return table


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what a page has between two marks, each on its own line.

    Raises:
      SystemExit: the page lacks a mark.
    """
    start, end = marks
    before, opening, rest = page.read_text().partition(start)
    _, closing, after = rest.partition(end)
    if not (opening and closing):
        raise SystemExit(f"{page} has no lines '{start}' and '{end}' to write the table between")
    Folder(page.parent).write_text(page.name, f"{before}{start}\n\n{text}\n\n{end}{after}")
