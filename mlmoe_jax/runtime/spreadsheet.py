"""CSV tables that a spreadsheet may open: no cell of text becomes a formula, and names are joined without ambiguity.

A spreadsheet runs a cell that begins with = + - or @, or with one of these after a tab or a carriage return. The names
of labels and images are not ours, so such a text is written with an apostrophe before it, which `plain` removes again.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # an apostrophe before it is text of ours or of the user's: one more is added
_ESCAPED = re.compile(r"'+[=+\-@\t\r]")


def guarded(cell: Any) -> Any:
    """Return a cell as it is written: text that would be a formula gets an apostrophe; numbers stay numbers."""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def plain(cell: str) -> str:
    """Return the text that `guarded` turned into this cell."""
    return cell[1:] if _ESCAPED.match(cell) else cell


def row_writer(file: TextIO) -> Callable[[Iterable[Any]], None]:
    """Return a function that writes a row of guarded cells to a CSV file."""
    line = io.StringIO(newline="")
    table = csv.writer(line, lineterminator="\r\n")  # of which csv quotes both; with "\n" it leaves "\r" bare

    def write(cells: Iterable[Any]) -> None:
        table.writerow([guarded(cell) for cell in cells])
        file.write(line.getvalue().removesuffix("\r\n") + "\n")
        line.seek(0)
        line.truncate()

    return write


def read_rows(lines: Iterable[str]) -> list[dict[str, str]]:
    """Return the rows of a table of `row_writer`, with its heading as keys. Raises ValueError if it is damaged."""
    try:
        rows = [[plain(cell) for cell in row] for row in csv.reader(lines, strict=True)]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    heading = rows[0] if rows else []
    return [dict(zip(heading, row, strict=True)) for row in rows[1:]]


def join_names(names: Sequence[str]) -> str:
    r"""Return names as one cell, separated by `;`; this and backslashes in a name get a backslash, as in `a\;b`."""
    return ";".join(name.replace("\\", r"\\").replace(";", r"\;") for name in names)


def split_names(cell: str, separator: str = ";") -> list[str]:
    """Return the names of a cell, as `join_names` writes them; other backslashes are part of the names."""
    if "\\" not in cell:
        return cell.split(separator)
    names, escaped = [""], re.escape(separator)
    for part in re.split(rf"(\\\\|\\{escaped}|{escaped})", cell):
        if part == separator:
            names.append("")
        else:
            names[-1] += part[1:] if part in ("\\\\", f"\\{separator}") else part
    return names
