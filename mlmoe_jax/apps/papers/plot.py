"""Plot of curves with error bars in several panels, as PNG."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt

from mlmoe_jax.apps.papers.grid import value_text

# The palette of Okabe and Ito, which is safe for all types of color vision
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_PANEL, _NAME = 320, 26  # pixels: least width of a panel, width of a name below its axis
_TITLE = 60  # letters per line
_LOGARITHMIC_FROM = 20  # ratio of largest to smallest x value from which the axis is logarithmic


class Mark(NamedTuple):
    """One point of a plot.

    Attributes:
      panel: the heading of its panel, or "".
      label: the name of its line.
      x: a number or a name.
      y: nan if missing.
      deviation: half the length of the error bar.
    """

    panel: str
    label: str
    x: Any
    y: float
    deviation: float = 0.0


def draw_plot(marks: Sequence[Mark], **texts: str) -> bytes:
    """Draw the marks and return the content of a PNG file. `texts` are the arguments of `make_chart`."""
    buffer = io.BytesIO()
    make_chart(marks, **texts).save(buffer, format="png", scale_factor=2)
    return buffer.getvalue()


def make_chart(marks: Sequence[Mark], *, x_label: str, y_label: str, title: str = "") -> alt.FacetChart:
    """Return the chart that `draw_plot` writes: panels side by side, with one color per label.

    The x axis is numeric if all x values are finite numbers. Otherwise it has the x values as names, in the order of
    `marks`, with dotted lines between the marks.
    """
    panels, x_values = list(dict.fromkeys(one.panel for one in marks)), list(dict.fromkeys(one.x for one in marks))
    numeric, x = x_axis(x_values, x_label)
    shown = [one for one in marks if math.isfinite(one.y)]
    base = alt.Chart().encode(x=x, color=_color([one.label for one in shown]))
    layers = _layers(base, y_label, solid=numeric)
    layers.data = alt.Data(values=[_values(one, numeric=numeric) for one in shown])
    header = alt.Header(labels=any(panels), labelFontSize=12)
    return (
        layers.properties(width=_PANEL if numeric else max(_PANEL, _NAME * len(x_values)), height=260)
        .facet(column=alt.Column("panel:N", sort=panels, title=None, header=header))
        .resolve_scale(y="independent")
        .properties(title=alt.TitleParams(textwrap.wrap(title, _TITLE), anchor="start", fontWeight="normal"))
        .configure_view(stroke=None)
        .configure_legend(orient="right")
    )


def _layers(base: alt.Chart, title: str, *, solid: bool) -> alt.LayerChart:
    """Return lines, error bars and points over the encodings of `base`."""
    y = alt.Y("y:Q", title=title, scale=alt.Scale(zero=False, padding=12))
    return alt.layer(
        base.mark_line(strokeWidth=1.4, strokeDash=[1, 0] if solid else [2, 3]).encode(y=y),
        base.mark_rule(strokeWidth=1).encode(y=alt.Y("low:Q", title=title), y2="high:Q"),
        base.mark_point(filled=True, size=45, opacity=1).encode(y=y),
    )


def _values(mark: Mark, *, numeric: bool) -> dict[str, Any]:
    """Return a mark as a row of the data of a chart."""
    return {
        "panel": mark.panel,
        "label": mark.label,
        "x": mark.x if numeric else value_text(mark.x),
        "y": mark.y,
        "low": mark.y - mark.deviation,
        "high": mark.y + mark.deviation,
    }


def _color(labels: Sequence[str]) -> alt.Color:
    """Return one color per label, with a legend."""
    domain = list(dict.fromkeys(labels))
    if len(domain) > len(_COLORS):
        colors = alt.Scale(domain=domain, scheme="viridis")
    else:
        colors = alt.Scale(domain=domain, range=_COLORS)
    return alt.Color("label:N", scale=colors, legend=alt.Legend(title=None, labelLimit=240, symbolLimit=0))


def x_axis(values: Sequence[Any], title: str) -> tuple[bool, alt.X]:
    """Return whether all x values are numbers, and the axis. A wide range of numbers gets a logarithmic axis."""
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):  # True is no number
        axis = alt.Axis(labelAngle=-50, labelLimit=160, grid=False)
        scale = alt.Scale(type="point", padding=0.5)
        return False, alt.X("x:N", sort=list(map(value_text, values)), title=title, axis=axis, scale=scale)
    wide = min(values) > 0 and max(values) >= _LOGARITHMIC_FROM * min(values)
    scale = {"type": "log"} if wide else {"type": "linear", "zero": False}
    axis = alt.Axis(values=sorted(values), format="~g", grid=False, labelOverlap="greedy", labelSeparation=4)
    return True, alt.X("x:Q", title=title, axis=axis, scale=alt.Scale(**scale, nice=False, padding=12))
