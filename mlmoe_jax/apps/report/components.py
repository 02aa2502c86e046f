"""The components of a page: sections with a few kinds of parts, which the template renders.

All text is plain and untrusted (label names, ids, paths); only the template creates markup.
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
    """Key numbers: (name, value, context)."""

    kind: ClassVar[str] = "numbers"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Facts:
    """Names and values, one per line."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A short static table; all columns are numeric except those whose indices are in `text`.

    meanings: per row, a definition that is shown below the row.
    """

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text: Sequence[int] = (0,)
    meanings: Sequence[str] = ()


@dataclass(frozen=True)
class SortableTable:
    """A table of any length with sorting by column and a search field.

    columns: (heading, "text" | "count" | "fraction" | "number"); fractions are shown in percent, None as a dash.
    """

    kind: ClassVar[str] = "sortable"
    name: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite chart with an alternative text for screen readers."""

    kind: ClassVar[str] = "chart"
    name: str
    title: str
    spec: Mapping[str, Any]
    alt: str
    wide: bool = False  # use the full width of the page


@dataclass(frozen=True)
class Charts:
    """Charts side by side, if the page is wide enough."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class LabelGraph:
    """Labels on a circle, ordered by group, with lines between labels that occur together.

    nodes: dicts of name, x, y (on the unit circle), angle (degrees), group (from 1), color (in the palette) and
    positives. edges: dicts of source and target (indices of `nodes`), color (None between groups), path (SVG), p and
    text. arcs: dicts of path, x, y, group and color.
    reach: half the side of the drawing. font: size of the names, in its units.
    """

    kind: ClassVar[str] = "graph"
    name: str
    title: str
    nodes: Sequence[Mapping[str, Any]]
    edges: Sequence[Mapping[str, Any]]
    arcs: Sequence[Mapping[str, Any]]
    reach: float
    font: float
    alt: str


@dataclass(frozen=True)
class Widget:
    """An interactive element, drawn by the page.js function of this name from `data`."""

    kind: ClassVar[str] = "widget"
    name: str
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
    """A section of the page; if the run folder lacks its data, `missing` says so, and `command` creates them."""

    name: str
    title: str
    parts: Sequence[Any] = ()
    missing: str = ""
    command: str = ""
