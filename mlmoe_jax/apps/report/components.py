"""The components of a page: sections with a few kinds of parts, which the template renders.

All text is plain and untrusted (label names, ids, paths); only the template and the scripts create markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class Numbers:
    """Key numbers: (name, value, context)."""

    kind: ClassVar[str] = "numbers"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class PageTable:
    """A table. A table of more than a few rows can be searched, and a table with headings can be sorted by column.

    Attributes:
      name: unique on the page.
      columns: the heading of a column of texts, or (heading, kind of its cells): "term" (a name and its definition),
        "count", "number", "fraction" (in percent) or "difference" (of fractions).
      rows: cells; None and nan become a dash.
    """

    kind: ClassVar[str] = "table"
    name: str
    columns: Sequence[str | tuple[str, str]]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite chart with an alternative text for screen readers."""

    name: str
    title: str
    spec: Mapping[str, Any]
    alt: str


@dataclass(frozen=True)
class Charts:
    """Charts side by side, if the page is wide enough."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Widget:
    """An interactive element that the function `draw` of samples.js draws from `data`. `name` is unique on the page."""

    kind: ClassVar[str] = "widget"
    name: str
    draw: str
    data: Any
    alt: str


@dataclass(frozen=True)
class Details:
    """Parts that are collapsed by default."""

    kind: ClassVar[str] = "details"
    summary: str
    parts: Sequence[Any]


@dataclass(frozen=True)
class Section:
    """A section of the page. If the run folder lacks its data, `missing` says so, and `command` creates the data."""

    name: str
    title: str
    parts: Sequence[Any] = ()
    missing: str = ""
    command: str = ""
