"""Charts as Vega-Lite specifications. The script page.js sets their colors according to the light or dark theme.

Heat maps encode values as opacities of one color, so that small values recede on light and on dark backgrounds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

BAR, LABEL_WIDTH = 15, 150  # pixels: height of a bar including its gap, maximum width of a label
_ACCENT, _AGAINST, _INK = "var(--accent)", "var(--against)", "var(--ink)"
NUMBER = ",.4~g"
Rows = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]


def _spec(chart: alt.TopLevelMixin, height: int | alt.Step, width: str | alt.Step = "container", **data: Rows) -> Spec:
    """Return the Vega-Lite specification of a chart as a dict, including its data sets.

    A width of "container" is that of the page. The chart refers to data sets by name, and `data` maps these names to
    rows. The rows are not given to Altair, which would spend much time on validating each row.
    """
    spec = chart.properties(height=height, width=width).to_dict()
    spec["datasets"] = {name: list(rows) for name, rows in data.items()}
    if width == "container":
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    del spec["$schema"], spec["config"]  # the page sets both
    return spec


def _chart(name: str) -> alt.Chart:
    """Return an empty chart that uses the data set `name`."""
    return alt.Chart(alt.NamedData(name=name))


def line_chart(rows: Rows, number_format: str) -> Spec:
    """Return a line chart over the training step, with one line per series.

    The rows have the keys step, value and series (the name of the line). `number_format` is in D3's notation.
    """
    series = list(dict.fromkeys(row["series"] for row in rows))
    few = len(rows) < 40 * len(series)
    chart = _chart("rows").mark_line(point={"size": 26} if few else False, strokeWidth=1.8)
    axis = alt.Axis(format=number_format, tickCount=5)
    chart = chart.encode(
        x=alt.X("step:Q", axis=alt.Axis(tickMinStep=1, tickCount=6, format="~s", grid=False)),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=axis),
        tooltip=["series:N", alt.Tooltip("step:Q", format=","), alt.Tooltip("value:Q", format=number_format)],
        color=alt.Color("series:N", sort=series, legend=alt.Legend(title=None) if len(series) > 1 else None),
    )
    return _spec(chart, 190, rows=rows)


def difference_bars(rows: Rows) -> Spec:
    """Return a chart with one horizontal bar per label for a difference, and a line for its interval.

    The rows are the bars from top to bottom, with label, difference, low and high (the ends of the interval), as
    fractions. The color of a bar shows the sign of the difference. A bar is pale if the interval contains 0.
    """
    tooltip = ["label:N", *(alt.Tooltip(f"{name}:Q", format="+.2%") for name in ("difference", "low", "high"))]
    label = alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL_WIDTH))
    bars = _chart("rows").mark_bar(height={"band": 0.72})
    bars = bars.encode(
        x=alt.X("difference:Q", title=None, axis=alt.Axis(format="+~%", orient="top", tickCount=6)),
        y=label,
        color=alt.condition("datum.difference >= 0", alt.value(_ACCENT), alt.value(_AGAINST)),
        opacity=alt.condition("datum.low > 0 || datum.high < 0", alt.value(0.8), alt.value(0.3)),
        tooltip=tooltip,
    )
    intervals = _chart("rows").mark_rule(color=_INK, strokeWidth=1.3)
    intervals = intervals.encode(x="low:Q", x2="high:Q", y=label, tooltip=tooltip)
    zero = _chart("zero").mark_rule(color=_INK).encode(x=alt.datum(0))
    return _spec(alt.layer(bars, intervals, zero), BAR * len(rows), rows=rows, zero=[{}])


def heat_map(rows: Rows, names: Sequence[str]) -> Spec:
    """Return a square heat map, with `names` as rows and columns, in order.

    The cells have the keys a (name of the row), b (name of the column), value (in [0, 1]) and text (the tooltip).
    Missing cells are empty.
    """
    size = max(10, min(40, 480 // len(names)))  # pixels of a cell
    axis = {"labelLimit": LABEL_WIDTH, "labelOverlap": False, "labelFontSize": min(11, size)}
    scale = alt.Scale(domain=list(names), padding=0.04)
    chart = _chart("rows").mark_rect(color=_ACCENT, strokeWidth=0)
    chart = chart.encode(
        x=alt.X("b:N", scale=scale, axis=alt.Axis(orient="top", labelAngle=-90, **axis)),
        y=alt.Y("a:N", scale=scale, axis=alt.Axis(**axis)),
        opacity=alt.Opacity("value:Q", scale=alt.Scale(domain=[0, 1], range=[0.04, 1], clamp=True), legend=None),
        tooltip=[alt.Tooltip("text:N", title="")],
    )
    return _spec(chart, alt.Step(size), alt.Step(size), rows=rows)


def unit_curve(points: np.ndarray, names: tuple[str, str, str], *, diagonal: bool = False) -> Spec:
    """Return a chart of one curve, with both axes from 0 to 1, and, if `diagonal`, the diagonal.

    `points` is f64[T,3]: x, y and a value that only the tooltip shows. `names` are the titles of these three values.
    """
    x, y, _ = names
    tooltip = [alt.Tooltip(f"{name}:Q", format=NUMBER) for name in names]
    chart = alt.layer(
        _unit_square("diagonal", x, y).mark_line(color=_INK, strokeDash=[3, 4], strokeWidth=1, tooltip=None),
        _unit_square("rows", x, y)
        .encode(tooltip=tooltip)
        .mark_line(color=_ACCENT, strokeWidth=2, point={"size": 20, "color": _ACCENT}),
    )
    rows = [dict(zip(names, point, strict=True)) for point in points.round(5).tolist()]
    ends = [{x: end, y: end} for end in (0, 1)] if diagonal else []
    return _spec(chart, 260, rows=rows, diagonal=ends)


def _unit_square(data: str, x: str, y: str) -> alt.Chart:
    """Return a chart of y over x without a mark. Both axes are from 0 to 100 %, and a line follows increasing x.

    `data` is the name of the data set. `x` and `y` are names of fields, and also the titles of the axes.
    """
    unit = alt.Scale(domain=[0, 1])
    return _chart(data).encode(
        x=alt.X(f"{x}:Q", scale=unit, axis=alt.Axis(format="%", grid=False)),
        y=alt.Y(f"{y}:Q", scale=unit, axis=alt.Axis(format="%")),
        order=alt.Order(f"{x}:Q"),
    )
