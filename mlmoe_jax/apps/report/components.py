"""The components of a page. A page has sections, and a section has parts of a few kinds, which the template renders.

All text is plain and untrusted (label names, ids, paths); only the template and the scripts create markup.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Note:
    """A paragraph of text."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class Numbers:
    """A list of key numbers. Each row has three texts: the name, the value, and the context of the value."""

    kind: ClassVar[str] = "numbers"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class PageTable:
    """A table of a page. A table with more than a few rows can be searched, and a table with headings can be sorted.

    Attributes:
      name: the id of the table, unique on the page.
      columns: one entry per column: the heading of a column of texts, or (heading, kind of the cells). The kinds are
        "term" (a name and its definition), "count", "number", "fraction" (shown in percent) and "difference" (of
        fractions).
      rows: the cells of each row. None and nan are shown as a dash.
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
    """Several charts. They are placed side by side if the page is wide enough."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Widget:
    """An interactive element that the function `draw` of samples.js draws from `data`, a value for JSON.

    `name` is its id, unique on the page, and `alt` an alternative text for screen readers.
    """

    kind: ClassVar[str] = "widget"
    name: str
    draw: str
    data: Any
    alt: str


@dataclass(frozen=True)
class Details:
    """A collapsible block of parts, which is collapsed by default and has the heading `summary`."""

    kind: ClassVar[str] = "details"
    summary: str
    parts: Sequence[Any]


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
      name: the id of the section, unique on the page.
      missing: if the run folder lacks the data of the section, a sentence that says so; otherwise "".
      command: the shell command that creates the missing data; "" if there is none.
    """

    name: str
    title: str
    parts: Sequence[Any] = ()
    missing: str = ""
    command: str = ""
