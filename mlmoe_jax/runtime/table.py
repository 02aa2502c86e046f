"""Tables: named columns and rows of values, written as text, Markdown, CSV or JSON; and the outcome of a command.

This is the only module that forms tables. A table has values, not texts: each column says how to show its values to
people, and CSV and JSON have the values themselves.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from mlmoe_jax.runtime.formats import dump_json, row_writer

NOTE_WIDTH = 120  # letters in a line of the notes below a table


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, Integral) else str(value)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      show: function that returns the displayed text of a value. It is not applied to strings. By default, integers are
        shown with thousands separators.
      align: "<" for left-aligned, ">" for right-aligned.
      width: the minimum width in the text of a table, in characters.
    """

    name: str
    show: Callable[[Any], str] = _plain
    align: str = ">"
    width: int = 0

    def cell(self, value: Any) -> str:
        """Return the displayed text of a value of this column: "" for None."""
        if value is None:
            return ""
        return value if isinstance(value, str) else self.show(value)


@dataclass(frozen=True)
class Table:
    """A table of values that can be written as text, Markdown, CSV or JSON.

    Attributes:
      columns: `Column` objects or names. If names are given, the first column is left-aligned and the other columns are
        right-aligned.
      rows: the cells of each row, at most one per column. The last cell of a shorter row is free text: it does not
        affect the widths of the columns.
      title: text above the table.
      notes: sentences below the table.
      document: the value that `json` writes in place of the rows; None writes the rows. It is given if the rows are
        only an excerpt of the results.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()
    document: Any = None

    def heading(self) -> list[Column]:
        return [
            one if isinstance(one, Column) else Column(one, align=">" if at else "<")
            for at, one in enumerate(self.columns)
        ]

    def cells(self) -> list[list[str]]:
        """Return the displayed texts of the table: first the list of headings, then one list per row."""
        columns = self.heading()
        shown = [[column.cell(value) for column, value in zip(columns, row, strict=False)] for row in self.rows]
        return [[column.name for column in columns], *shown]

    def text(self) -> str:
        """Return the title, the aligned table and the notes for a terminal, without headings if all are empty."""
        columns, (names, *rows) = self.heading(), self.cells()
        lines = [*aligned([names, *rows] if any(names) else rows, columns), *map(_wrapped, self.notes)]
        return "\n".join([self.title, *lines] if self.title else lines)

    def markdown(self) -> str:
        """Return the table as Markdown. The title becomes a heading, and the notes become a list."""
        columns, (names, *rows) = self.heading(), self.cells()
        padded = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
        rule = f"|{'|'.join('---' if column.align == '<' else '---:' for column in columns)}|"
        lines = [*([f"# {self.title}", ""] if self.title else []), _markdown_row(names), rule]
        lines += map(_markdown_row, padded)
        lines += ["", *(f"* {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return the headings and the values as CSV. Cells are escaped by `formats.escape_cell`."""
        file = io.StringIO()
        write = row_writer(file)
        write(column.name for column in self.heading())
        for row in self.rows:
            write(row)
        return file.getvalue()

    def values(self) -> Any:
        """Return the value that `json` writes: `document`, or if it is None a list with one dict per row."""
        if self.document is not None:
            return self.document
        names = [column.name for column in self.heading()]
        return [dict(zip(names, row, strict=False)) for row in self.rows]

    def json(self) -> str:
        """Return `values()` as strict JSON, in which nan becomes null."""
        return dump_json(self.values(), indent=2)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command. The command line prints it as text or, with --json, as one JSON document.

    Attributes:
      parts: tables and texts, which are printed with one empty line between them. () prints nothing.
      document: the value that --json prints; None means the values of the first table.
      exit_code: the exit code of the command, see `errors`.
    """

    parts: Sequence[Table | str] = ()
    document: Any = None
    exit_code: int = 0

    def text(self) -> str:
        """Return all parts as text for a terminal."""
        return "\n\n".join(part.text() if isinstance(part, Table) else part for part in self.parts)

    def json(self) -> str:
        """Return `document`, or if it is None the first table, as strict JSON. Without either, return the text."""
        if self.document is not None:
            return dump_json(self.document, indent=2)
        tables = [part for part in self.parts if isinstance(part, Table)]
        return tables[0].json() if tables else self.text()


def aligned(rows: Sequence[Sequence[str]], columns: Sequence[Column]) -> Iterator[str]:
    """Yield each row as a line of text, with cells padded to column widths and two spaces between columns."""
    complete = [row if len(row) == len(columns) else row[:-1] for row in rows]  # without free text
    widths = [
        max([column.width, *(len(row[at]) for row in complete if at < len(row))]) for at, column in enumerate(columns)
    ]
    for row, cells in zip(rows, complete, strict=True):
        padded = [f"{cell:{column.align}{width}}" for cell, column, width in zip(cells, columns, widths, strict=False)]
        yield "  ".join([*padded, *row[len(cells) :]]).rstrip()


def _wrapped(note: str) -> str:
    return textwrap.fill(note, NOTE_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _markdown_row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
