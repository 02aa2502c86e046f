"""Plot of curves with error bars in several panels, as PNG."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt

from mlmoe_jax.apps.papers.grid import as_text

# The palette of Okabe and Ito, which is safe for all types of color vision
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_PANEL, _NAME = 320, 26  # pixels: least width of a panel, width of a name below its axis
_TITLE = 60  # letters per line
_LOGARITHMIC_FROM = 20  # ratio of largest to smallest x value from which the axis is logarithmic


class Mark(NamedTuple):
    """One point of a plot: panel ("" = no heading), label of its line, x, y (nan = missing), and the error bar."""

    panel: str
    label: str
    x: Any
    y: float
    deviation: float = 0.0


def draw(marks: Sequence[Mark], **texts: str) -> bytes:
    """Draw the marks and return the content of a PNG file. `texts` are the arguments of `chart`."""
    buffer = io.BytesIO()
    chart(marks, **texts).save(buffer, format="png", scale_factor=2)
    return buffer.getvalue()


def chart(marks: Sequence[Mark], *, x_label: str, y_label: str, title: str = "") -> alt.FacetChart:
    """Return the chart that `draw` writes: panels side by side, with one color per label.

    The x axis is numeric if all x values are finite numbers. Otherwise it has the x values as names, in the order of
    `marks`, with dotted lines between the marks.
    """
    panels, labels, x_values = (list(dict.fromkeys(one[column] for one in marks)) for column in range(3))
    numeric, x = x_axis(x_values, x_label)
    rows = [
        {"panel": one.panel, "label": one.label, "x": one.x if numeric else as_text(one.x), "y": one.y}
        | {"low": one.y - one.deviation, "high": one.y + one.deviation}
        for one in marks
        if math.isfinite(one.y)
    ]
    present = {row["label"] for row in rows}
    labels = [label for label in labels if label in present]
    many = len(labels) > len(_COLORS)
    colors = alt.Scale(domain=labels, scheme="viridis") if many else alt.Scale(domain=labels, range=_COLORS)
    legend = alt.Legend(title=None, labelLimit=240, symbolLimit=0)
    base = alt.Chart().encode(x=x, color=alt.Color("label:N", scale=colors, legend=legend))
    y = alt.Y("y:Q", title=y_label, scale=alt.Scale(zero=False, padding=12))
    layers = alt.layer(
        base.mark_line(strokeWidth=1.4, strokeDash=[1, 0] if numeric else [2, 3]).encode(y=y),
        base.mark_rule(strokeWidth=1).encode(y=alt.Y("low:Q", title=y_label), y2="high:Q"),
        base.mark_point(filled=True, size=45, opacity=1).encode(y=y),
        data=alt.Data(values=rows),
    )
    headings = alt.Column("panel:N", sort=panels, title=None, header=alt.Header(labels=any(panels), labelFontSize=12))
    return (
        layers.properties(width=_PANEL if numeric else max(_PANEL, _NAME * len(x_values)), height=260)
        .facet(column=headings)
        .resolve_scale(y="independent")
        .properties(title=alt.TitleParams(textwrap.wrap(title, _TITLE), anchor="start", fontWeight="normal"))
        .configure_view(stroke=None)
        .configure_legend(orient="right")
    )


def x_axis(values: Sequence[Any], title: str) -> tuple[bool, alt.X]:
    """Return whether the x axis is numeric, and the axis, which is logarithmic for a wide range of numbers."""
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):  # True is no number
        axis = alt.Axis(labelAngle=-50, labelLimit=160, grid=False)
        scale = alt.Scale(type="point", padding=0.5)
        return False, alt.X("x:N", sort=list(map(as_text, values)), title=title, axis=axis, scale=scale)
    wide = min(values) > 0 and max(values) >= _LOGARITHMIC_FROM * min(values)
    scale = {"type": "log"} if wide else {"type": "linear", "zero": False}
    axis = alt.Axis(values=sorted(values), format="~g", grid=False, labelOverlap="greedy", labelSeparation=4)
    return True, alt.X("x:Q", title=title, axis=axis, scale=alt.Scale(**scale, nice=False, padding=12))
