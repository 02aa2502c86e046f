"""What a page is made of: sections of a few kinds of parts, which the template knows how to show.

All text in them is plain and untrusted (label names, ids, paths); only the template makes markup.
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
class Heading:
    """A heading inside a section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Numbers:
    """Key numbers to be seen at a glance: (what, value, what it is of)."""

    kind: ClassVar[str] = "numbers"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Facts:
    """Names and values, a line each."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A short table that stays as it is; all columns but those numbered in `text` are numbers."""

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text: Sequence[int] = (0,)


@dataclass(frozen=True)
class SortableTable:
    """A table of any length that a click on a heading sorts and words search.

    columns: (heading, "text" | "count" | "fraction" | "number"); a fraction is shown in percent, None as a dash.
    """

    kind: ClassVar[str] = "sortable"
    name: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite chart with a text that says what it shows to those who do not see it."""

    kind: ClassVar[str] = "chart"
    name: str
    title: str
    spec: Mapping[str, Any]
    alt: str
    wide: bool = False  # over the whole width of the page


@dataclass(frozen=True)
class Charts:
    """Charts side by side where the page is wide enough."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class LabelGraph:
    """Labels on a circle, group by group, and lines between those that come together.

    nodes: dicts of name, x, y (on the unit circle), angle (degrees), group (from 1), colour (of the palette) and
    positives. edges: dicts of source and target (rows of `nodes`), colour (None between groups), path (SVG), p and
    text. arcs: dicts of path, x, y, group and colour.
    reach: half the side of the drawing.
    """

    kind: ClassVar[str] = "graph"
    name: str
    title: str
    nodes: Sequence[Mapping[str, Any]]
    edges: Sequence[Mapping[str, Any]]
    arcs: Sequence[Mapping[str, Any]]
    reach: float
    alt: str


@dataclass(frozen=True)
class Widget:
    """Something interactive: page.js has a function of this name, which gets `data`."""

    kind: ClassVar[str] = "widget"
    name: str
    data: Any
    alt: str


@dataclass(frozen=True)
class Details:
    """Parts that are folded away at first."""

    kind: ClassVar[str] = "details"
    summary: str
    parts: Sequence[Any]


@dataclass(frozen=True)
class Section:
    """A section of the page; `missing` says what would make it appear where the run folder lacks its data."""

    name: str
    title: str
    parts: Sequence[Any] = ()
    missing: str = ""


def percent(value: float | None, digits: int = 2) -> str:
    """Return a fraction in percent, a dash where it is undefined."""
    return "–" if value is None or value != value else f"{100 * value:.{digits}f}"
