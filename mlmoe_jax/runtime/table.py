"""Tables: named columns and rows of values, written as text, Markdown, CSV or JSON; and the outcome of a command.

This is the only module that forms tables. A table has values, not texts: each column says how to show its values to
people, and CSV and JSON have the values themselves.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlmoe_jax.runtime.formats import dump_json, row_writer

NOTE_WIDTH = 120  # letters in a line of the notes below a table


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      name: the heading.
      show: returns the text of a value, for people. Values that are texts already are shown as they are.
      align: "<" for left, ">" for right.
      width: the smallest width in a text.
    """

    name: str
    show: Callable[[Any], str] = str
    align: str = ">"
    width: int = 0

    def cell(self, value: Any) -> str:
        """Return the text of a value of this column; None is empty."""
        if value is None:
            return ""
        return value if isinstance(value, str) else self.show(value)


@dataclass(frozen=True)
class Table:
    """A table of values.

    A row may have fewer cells than there are columns. Its last cell is then free text, which widens no column.

    Attributes:
      columns: columns, or only their names; the first column of a name is left-aligned, and others right-aligned.
      rows: one value per column.
      title: lines above the table.
      notes: sentences below it.
      document: the value that `json` writes instead of the rows, if the rows are only a part or an excerpt of it.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()
    document: Any = None

    def heading(self) -> list[Column]:
        """Return all columns as `Column`."""
        default = [Column(str(one), align="<" if at == 0 else ">") for at, one in enumerate(self.columns)]
        return [one if isinstance(one, Column) else default[at] for at, one in enumerate(self.columns)]

    def cells(self) -> list[list[str]]:
        """Return the heading and the rows as texts."""
        columns = self.heading()
        shown = [[column.cell(value) for column, value in zip(columns, row, strict=False)] for row in self.rows]
        return [[column.name for column in columns], *shown]

    def text(self) -> str:
        """Return title, aligned table and notes for a terminal. A heading without names is left out."""
        columns, (names, *rows) = self.heading(), self.cells()
        lines = [*aligned([names, *rows] if any(names) else rows, columns), *map(_wrapped, self.notes)]
        return "\n".join([self.title, *lines] if self.title else lines)

    def markdown(self) -> str:
        """Return title, table and notes as Markdown; the title is a heading, and the notes are a list."""
        columns, (names, *rows) = self.heading(), self.cells()
        padded = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
        rule = f"|{'|'.join('---' if column.align == '<' else '---:' for column in columns)}|"
        lines = [*([f"# {self.title}", ""] if self.title else []), _markdown_row(names), rule]
        lines += map(_markdown_row, padded)
        lines += ["", *(f"* {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return heading and values as CSV. Cells that look like formulas are escaped, see `formats.escape_cell`."""
        file = io.StringIO()
        write = row_writer(file)
        write(column.name for column in self.heading())
        for row in self.rows:
            write(row)
        return file.getvalue()

    def values(self) -> Any:
        """Return what `json` writes: the document, or one dict per row."""
        if self.document is not None:
            return self.document
        names = [column.name for column in self.heading()]
        return [dict(zip(names, row, strict=False)) for row in self.rows]

    def json(self) -> str:
        """Return `values` as strict JSON: nan becomes null."""
        return dump_json(self.values(), indent=2)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command, which the command line prints as text or, with --json, as one document.

    Attributes:
      parts: tables and plain texts, one empty line apart; none, if the command prints nothing.
      document: the value of --json; by default the values of the first table.
      exit_code: see `errors`.
    """

    parts: Sequence[Table | str] = ()
    document: Any = None
    exit_code: int = 0

    def text(self) -> str:
        """Return all parts for a terminal."""
        return "\n\n".join(part.text() if isinstance(part, Table) else part for part in self.parts)

    def json(self) -> str:
        """Return the document as strict JSON. Without a document and a table, return the text."""
        if self.document is not None:
            return dump_json(self.document, indent=2)
        tables = [part for part in self.parts if isinstance(part, Table)]
        return tables[0].json() if tables else self.text()


def aligned(rows: Sequence[Sequence[str]], columns: Sequence[Column]) -> Iterator[str]:
    """Yield rows of texts as lines with two spaces between the columns."""
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
