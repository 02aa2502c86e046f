"""Format names, numbers and tables as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def some(names: Sequence[str], most: int = 8) -> str:
    """Return up to `most` names of a list, and the total number if there are more."""
    return ", ".join(names[:most]) + (f", … ({len(names)})" if len(names) > most else "")


def printable(text: str, most: int = 2000) -> str:
    """Return an untrusted text as one line of at most `most` letters, without control characters."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return line if len(line) <= most else f"{line[:most]} …"


def quantity(number: int, noun: str) -> str:
    """Return a number with its regular noun, such as "1 image" and "1,200 images"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(value: float | None, digits: int = 2, *, sign: str = "-") -> str:
    """Return a fraction in percent, or a dash for None and nan. With sign="+" positive numbers have a sign too."""
    return "–" if value is None or math.isnan(value) else f"{100 * value:{sign}.{digits}f}"


def text_table(rows: Sequence[Sequence[str]], *, align: str = "<>", least: Sequence[int] = (0,)) -> str:
    """Return rows as lines, their cells aligned and two spaces apart.

    A row may have fewer cells than the longest row; its last cell is then free text, which does not widen a column.

    Args:
      rows: cells.
      align: "<" or ">" for each column. The last letter is for all further columns.
      least: the smallest width of each column. The last number is for all further columns.
    """

    def at(values: Sequence[Any], column: int) -> Any:
        return values[min(column, len(values) - 1)]

    columns = max(map(len, rows), default=0)
    aligned = [row if len(row) == columns else row[:-1] for row in rows]
    widths = [max(at(least, k), *(len(row[k]) for row in aligned if k < len(row))) for k in range(columns)]
    lines = []
    for row, cells in zip(rows, aligned, strict=True):
        padded = [f"{cell:{at(align, k)}{widths[k]}}" for k, cell in enumerate(cells)]
        lines.append("  ".join([*padded, *row[len(cells) :]]).rstrip())
    return "\n".join(lines)
