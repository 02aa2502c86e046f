"""Charts as Vega-Lite specifications; page.js sets the colors, which follow the theme of the page.

The color of a series is given by its position in the palette of the page. Heat maps encode values as opacities of one
color, so that small values recede on light and on dark backgrounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

BAR, LABEL_WIDTH = 15, 150  # pixels: height of a bar including its gap, maximum width of a label
CHOSEN = "chosen"  # the data set that page.js fills
_ACCENT, _AGAINST, _INK, _FAINT = "var(--accent)", "var(--against)", "var(--ink)", "var(--faint)"
_NUMBER = ",.4~g"
Rows = Sequence[Mapping[str, Any]]


def _spec(chart: alt.TopLevelMixin, **data: Rows) -> dict[str, Any]:
    """Return the specification of a chart with its data, added without Altair, whose validation per row is slow."""
    spec = chart.to_dict()
    spec["datasets"] = {name: list(rows) for name, rows in data.items()}
    if spec["width"] == "container":
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    for name in ("$schema", "config"):  # the page sets both
        spec.pop(name, None)
    return spec


def _chart(name: str) -> alt.Chart:
    """Return a chart of the data set `name`."""
    return alt.Chart(alt.NamedData(name=name))


def curves(rows: Rows, *, y_title: str, y_format: str = _NUMBER, from_zero: bool = True) -> dict[str, Any]:
    """Return lines over the training step; each row has step, value and series."""
    series = list(dict.fromkeys(row["series"] for row in rows))
    few = len(rows) < 40 * len(series)
    chart = _chart("rows").mark_line(point={"size": 26} if few else False, strokeWidth=1.8)
    chart = chart.encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, tickCount=6, format="~s", grid=False)),
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=from_zero), axis=alt.Axis(format=y_format, tickCount=5)),
        tooltip=[
            alt.Tooltip("series:N", title="curve"),
            alt.Tooltip("step:Q", format=","),
            alt.Tooltip("value:Q", title=y_title, format=y_format),
        ],
        color=alt.Color("series:N", sort=series, legend=alt.Legend(title=None) if len(series) > 1 else None),
    )
    return _spec(chart.properties(width="container", height=190), rows=rows)


def bars(rows: Rows, *, x_title: str, label_title: str = "label") -> dict[str, Any]:
    """Return horizontal bars of fractions in the order of `rows`; each row has label, value and detail."""
    chart = _chart("rows").mark_bar(color=_ACCENT, height={"band": 0.72})
    chart = chart.encode(
        x=alt.X(
            "value:Q",
            title=x_title,
            axis=alt.Axis(format="%", orient="top", tickCount=6),
            scale=alt.Scale(domain=[0, 1]),
        ),
        y=alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL_WIDTH)),
        tooltip=[
            alt.Tooltip("label:N", title=label_title),
            alt.Tooltip("value:Q", title=x_title, format=".2%"),
            alt.Tooltip("detail:N", title="of"),
        ],
    )
    return _spec(chart.properties(width="container", height=BAR * len(rows)), rows=rows)


def difference_bars(rows: Rows, *, x_title: str) -> dict[str, Any]:
    """Return bars to the left and right of 0 in the order of `rows`: label, value, low, high, here, there (fractions).

    A bar is pale if its interval contains 0.
    """
    y = alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL_WIDTH))
    x = alt.X("value:Q", title=x_title, axis=alt.Axis(format="+~%", orient="top", tickCount=6))
    tooltip = [
        alt.Tooltip("label:N"),
        alt.Tooltip("value:Q", title=x_title, format="+.2%"),
        alt.Tooltip("low:Q", title="interval from", format="+.2%"),
        alt.Tooltip("high:Q", title="to", format="+.2%"),
        alt.Tooltip("here:Q", title="this run", format=".2%"),
        alt.Tooltip("there:Q", title="other run", format=".2%"),
    ]
    bar = _chart("rows").mark_bar(height={"band": 0.72})
    bar = bar.encode(
        x=x,
        y=y,
        tooltip=tooltip,
        color=alt.condition("datum.value >= 0", alt.value(_ACCENT), alt.value(_AGAINST)),
        opacity=alt.condition("datum.low > 0 || datum.high < 0", alt.value(0.8), alt.value(0.3)),
    )
    interval = _chart("rows").mark_rule(color=_INK, strokeWidth=1.3)
    interval = interval.encode(x="low:Q", x2="high:Q", y=y, tooltip=tooltip)
    zero = _chart("zero").mark_rule(color=_INK).encode(x=alt.datum(0))
    layers = alt.layer(bar, interval, zero)
    return _spec(layers.properties(width="container", height=BAR * len(rows)), rows=rows, zero=[{}])


def heat_map(
    rows: Rows, *, x: Sequence[str], y: Sequence[str], value_title: str, x_title: str = "", y_title: str = ""
) -> dict[str, Any]:
    """Return a heat map of cells with x, y, value in [0, 1] and text; cells missing from `rows` are empty."""
    chart = _chart("rows").mark_rect(color=_ACCENT, strokeWidth=0)
    height = width = next(size for most, size in ((20, 24), (40, 16), (math.inf, 10)) if len(y) <= most)
    font = min(11, height)
    upright = len(x) > 8
    if not upright:
        width = max(width, min(64, 320 // len(x)))
    across = alt.Axis(
        orient="top",
        labelAngle=-90 if upright else 0,
        labelLimit=LABEL_WIDTH if upright else width,
        labelOverlap=False,
        labelFontSize=font,
    )
    down = alt.Axis(labelLimit=LABEL_WIDTH, labelOverlap=False, labelFontSize=font)
    chart = chart.encode(
        x=alt.X("x:N", scale=alt.Scale(domain=list(x), padding=0.04), title=x_title or None, axis=across),
        y=alt.Y("y:N", scale=alt.Scale(domain=list(y), padding=0.04), title=y_title or None, axis=down),
        opacity=alt.Opacity("value:Q", scale=alt.Scale(domain=[0, 1], range=[0.04, 1], clamp=True), legend=None),
        tooltip=[alt.Tooltip("text:N", title=value_title)],
    )
    return _spec(chart.properties(width=alt.Step(width), height=alt.Step(height)), rows=rows)


def precision_recall(pooled: Rows) -> dict[str, Any]:
    """Return the pooled precision-recall curve (recall, precision, threshold) behind that of the selected label."""
    x = alt.X("recall:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", grid=False))
    y = alt.Y("precision:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    tooltip = [
        alt.Tooltip("curve:N"),
        alt.Tooltip("recall:Q", format=".1%"),
        alt.Tooltip("precision:Q", format=".1%"),
        alt.Tooltip("threshold:Q", title="score at least", format=".3f"),
    ]
    order = alt.Order("recall:Q")
    back = _chart("pooled").mark_line(color=_FAINT, strokeWidth=2)
    front = _chart(CHOSEN).mark_line(
        color=_ACCENT, strokeWidth=2, interpolate="step-before", point={"size": 14, "color": _ACCENT}
    )
    layers = [layer.encode(x=x, y=y, order=order, tooltip=tooltip) for layer in (back, front)]
    return _spec(alt.layer(*layers).properties(width="container", height=260), pooled=pooled)


def reliability(pooled: Rows) -> dict[str, Any]:
    """Return the share of positives over the mean score per bin (score, share, count): pooled, and selected label."""
    x = alt.X("score:Q", scale=alt.Scale(domain=[0, 1]), title="mean score", axis=alt.Axis(format="%", grid=False))
    y = alt.Y("share:Q", scale=alt.Scale(domain=[0, 1]), title="share of positives", axis=alt.Axis(format="%"))
    tooltip = [
        alt.Tooltip("curve:N"),
        alt.Tooltip("score:Q", title="mean score", format=".1%"),
        alt.Tooltip("share:Q", title="positive", format=".1%"),
        alt.Tooltip("count:Q", title="scores in the bin", format=","),
    ]
    diagonal = _chart("diagonal").mark_line(color=_INK, strokeDash=[3, 4], strokeWidth=1, tooltip=None)
    back = _chart("pooled").mark_line(color=_FAINT, strokeWidth=2, point={"size": 30, "color": _FAINT})
    front = _chart(CHOSEN).mark_line(color=_ACCENT, strokeWidth=2, point={"size": 36, "color": _ACCENT})
    layers = [diagonal.encode(x=x, y=y), *(layer.encode(x=x, y=y, tooltip=tooltip) for layer in (back, front))]
    ends = [{"score": 0, "share": 0}, {"score": 1, "share": 1}]
    return _spec(alt.layer(*layers).properties(width="container", height=260), pooled=pooled, diagonal=ends)


def label_frequency(rows: Rows) -> dict[str, Any]:
    """Return one point per label: value, a fraction, over images, a count on a logarithmic axis."""
    fewest = min((row["images"] for row in rows), default=0)
    chart = _chart("rows").mark_point(filled=True, size=46, opacity=0.75, color=_ACCENT)
    chart = chart.encode(
        x=alt.X(
            "images:Q",
            title="training images with the label",
            # symlog is like a logarithm, and defined for a label without training images
            scale=alt.Scale(type="log" if fewest else "symlog", padding=12 if fewest else 0, nice=False),
            axis=alt.Axis(grid=False, tickCount=6, format="~s"),
        ),
        y=alt.Y(
            "value:Q", title="average precision", scale=alt.Scale(zero=False), axis=alt.Axis(format="~%", tickCount=5)
        ),
        tooltip=[
            alt.Tooltip("label:N"),
            alt.Tooltip("value:Q", title="average precision", format=".2%"),
            alt.Tooltip("images:Q", title="training images", format=","),
        ],
    )
    return _spec(chart.properties(width="container", height=220), rows=rows)
