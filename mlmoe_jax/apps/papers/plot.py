"""Plot of lines in several panels, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import altair as alt

from mlmoe_jax.apps.papers.grid import value_text

_LOGARITHMIC_FROM = 20  # ratio of largest to smallest x value from which the axis is logarithmic


def draw_plot(points: Sequence[dict[str, Any]], *, x_title: str, y_title: str, title: str) -> bytes:
    """Draw points as lines and return the content of a PNG file.

    Points with the same panel, line and x are averaged, with an error bar of one sample standard deviation.

    Args:
      points: the points, with "panel" and "line", the names of their panel and line; "x", a number or a name; and "y".
      x_title: the title of all x axes. The axis is numeric if all x values are numbers.
      y_title: the title of all y axes.
      title: the title of the plot.
    """
    scale = {"title": y_title, "scale": alt.Scale(zero=False)}
    base = alt.Chart(alt.Data(values=points)).encode(x=x_axis(points, x_title), color=alt.Color("line:N", title=None))
    lines = base.mark_line(point=True).encode(y=alt.Y("mean(y):Q", **scale))
    bars = base.mark_errorbar(extent="stdev").encode(y=alt.Y("y:Q", **scale))
    panels = alt.Column("panel:N", title=None, sort=None)
    buffer = io.BytesIO()
    chart = (lines + bars).facet(column=panels, title=title).resolve_scale(y="independent")
    chart.save(buffer, format="png", scale_factor=2)
    return buffer.getvalue()


def x_axis(points: Sequence[dict[str, Any]], title: str) -> alt.X:
    """Return the x axis. A wide range of numbers gets a logarithmic axis."""
    values = list(dict.fromkeys(point["x"] for point in points))
    if any(isinstance(value, str) for value in values):
        return alt.X("x:N", title=title, sort=values)
    wide = min(values) > 0 and max(values) >= _LOGARITHMIC_FROM * min(values)
    return alt.X("x:Q", title=title, scale=alt.Scale(type="log" if wide else "linear", zero=False))


def axis_value(value: Any) -> float | str:
    """Return a value for the x axis: a number, or the text of any other value."""
    return value if type(value) in (int, float) else value_text(value)
