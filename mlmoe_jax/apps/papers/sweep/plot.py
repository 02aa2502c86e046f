"""Plot of curves with error bars in several panels, as PNG."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from mlmoe_jax.evaluation.metrics.rates import sample_deviation

# The palette of Okabe and Ito, which is safe for all types of color vision
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_MARKERS = "os^DvPX"
_LOGARITHMIC_FROM = 20.0  # ratio of largest to smallest x value from which the axis may be logarithmic
_MANY = 10  # names on an axis from which they are steep
_LETTERS = 13  # of a title per inch
_NARROWEST_TICK = 0.06  # fraction of the axis; for closer x values, matplotlib chooses the ticks


@dataclass(frozen=True)
class Line:
    """One curve: y and its sample standard deviation (0 = no error bar) at some of the x values of the plot."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]
    deviation: Sequence[float]
    level: bool = False  # unordered points: draw a line at the mean of y, in a band of ± its sample deviation


def draw(
    panels: Mapping[str, Sequence[Line]],
    x_values: Sequence[Any],
    *,
    x_label: str,
    y_label: str,
    legend: str = "",
    title: str = "",
) -> bytes:
    """Draw the lines of all panels over `x_values` and return the content of a PNG file.

    Args:
      panels: heading -> lines; "" = no heading. Lines with the same label have the same color and marker.
      x_values: all x values. For finite numbers, the axis is numeric, and logarithmic for a wide range; otherwise it is
        categorical in this order, with dotted lines between the points.
      legend: heading of the legend.
    """
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("default"):  # independent of the user's matplotlibrc, which may require LaTeX
        panel = max(4.2, 0.3 * len(x_values)) if not _is_numeric(x_values) else 4.2
        width = 1.6 + panel * len(panels)
        figure = Figure(figsize=(width, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        styles = _styles([line.label for lines in panels.values() for line in lines])
        handles: dict[str, Any] = {}
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (heading, lines) in zip(grid, panels.items(), strict=True):
            place, joined = _x_axis(axes, x_values)
            for line in lines:
                handles.setdefault(line.label, _draw_line(axes, line, place, joined, styles[line.label]))
            axes.set_title(_plain(heading), fontsize=10)
            axes.set_xlabel(_plain(x_label))
            axes.set_ylabel(_plain(y_label))
            axes.margins(x=0.07, y=0.12)
            axes.grid(color="#000000", alpha=0.12, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=9)
        figure.legend(
            list(handles.values()),
            [_plain(label) for label in handles],
            title=_plain(legend),
            loc="outside right upper",
            frameon=False,
            fontsize=9,
            title_fontsize=9,
            alignment="left",
        )
        if title:
            text = "\n".join(textwrap.fill(line, int(_LETTERS * (width - 2))) for line in title.splitlines())
            figure.suptitle(text.replace("$", r"\$"), fontsize=10, x=0.01, ha="left")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=180)
    return buffer.getvalue()


def _styles(labels: Sequence[str]) -> dict[str, list]:
    """Return the color and marker of each label."""
    labels = list(dict.fromkeys(labels))
    colors: Sequence[Any] = _COLORS
    if len(labels) > len(_COLORS):
        from matplotlib import colormaps

        colors = colormaps["viridis"](np.linspace(0, 0.92, len(labels)))
    return {label: style for label, *style in zip(labels, colors, cycle(_MARKERS), strict=False)}


def _draw_line(axes: Any, line: Line, place: Mapping[Any, float], joined: str, style: Sequence[Any]) -> Any:
    color, marker = style
    x, y, deviation = zip(*sorted(zip(map(place.get, line.x), line.y, line.deviation, strict=True)), strict=True)
    bars = axes.errorbar(
        x,
        y,
        yerr=deviation if any(deviation) else None,
        color=color,
        marker=marker,
        linestyle="none" if line.level else joined,
        markersize=5,
        linewidth=1.4,
        elinewidth=1,
        capsize=3,
    )
    if line.level:
        mean = float(np.mean(y))
        axes.axhline(mean, color=color, linestyle="--", linewidth=1)
        if len(y) > 1:
            band = sample_deviation(y)
            axes.axhspan(mean - band, mean + band, color=color, alpha=0.12, linewidth=0)
    return bars


def _x_axis(axes: Any, values: Sequence[Any]) -> tuple[dict[Any, float], str]:
    """Set scale and ticks; return the position of each value and the line style between points."""
    if not _is_numeric(values):
        names = [_plain(str(value), 24) for value in values]
        axes.set_xticks(range(len(values)), names)
        if sum(map(len, names)) > 36:
            axes.tick_params(axis="x", rotation=25 if len(names) <= _MANY else 60)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        return {value: float(place) for place, value in enumerate(values)}, ":"
    ordered = np.sort(np.asarray(values, np.float64))
    positive = ordered[ordered > 0]
    wide = ordered[0] >= 0 and len(positive) > 1 and positive[-1] >= _LOGARITHMIC_FROM * positive[0]
    if wide and _narrowest(np.log(positive)) > _narrowest(ordered):
        if ordered[0] > 0:
            axes.set_xscale("log")
        else:  # 0 needs an axis that is linear below the smallest positive value
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    if _narrowest(axes.xaxis.get_transform().transform(ordered)) >= _NARROWEST_TICK:
        axes.set_xticks(list(values), [f"{value:g}" for value in values])
        axes.minorticks_off()
    return {value: float(value) for value in values}, "-"


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _narrowest(ordered: np.ndarray) -> float:
    """Return the smallest distance between neighbors, as a fraction of the range; 1 for a single value."""
    return float(np.diff(ordered).min() / np.ptp(ordered)) if len(ordered) > 1 else 1.0


def _plain(text: str, longest: int = 40) -> str:
    """Return text, truncated to `longest`, that matplotlib draws literally instead of as a formula."""
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return text.replace("$", r"\$")
