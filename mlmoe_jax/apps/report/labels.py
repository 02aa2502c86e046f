"""The section about the labels: groups and co-occurrence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Heading, LabelGraph, Note, Section, SortableTable
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.data.labels.space import LabelSpace

MOST_LABELS = 80  # in graphs and heat maps
MOST_EDGES = 200
LONGEST_NAME = 22  # characters of a label on the circle
FEW_LABELS = 20  # which have room for a larger font
_FONT, _LARGE_FONT = 0.052, 0.085  # of the radius of the circle
STRONG = 0.4  # minimum p(b|a) of an edge, the threshold of ML-GCN
_SMALLEST = 0.005  # minimum p(b|a) of a cell in the heat map
_GAP = 0.35  # between groups on the circle, in units of the distance between labels
_NAMES = ("split", "a", "b")  # columns of cooccurrence.csv with names, which may look like numbers
_SIDES = (("co", "Co-occurrence groups (CO)"), ("dc", "Discriminative groups (DC)"))


def groups(files: RunFiles) -> Section:
    """Return CO and DC groups as graphs, p(b|a) as heat maps, and the table of co-occurrence overfitting."""
    title, space = "Label groups and co-occurrence", files.label_space
    if space is None:
        return Section("groups", title, missing="label_space.npz is written when training starts.")
    shown = np.sort(np.argsort(-space.positives, kind="stable")[:MOST_LABELS])
    conditional = conditional_probability(space, shown)
    parts: list[Any] = [Note(_explain(space, len(shown)))]
    sides = [(side, title, getattr(space, f"{side}_group")[shown]) for side, title in _SIDES]
    if all(len(np.unique(getattr(space, f"{side}_group"))) == 1 for side, _ in _SIDES):
        parts.append(Note("This model does not group its labels."))
        sides = [("co", "Labels that occur together", sides[0][2])]
    if not space.positives.any():
        parts.append(Note("The label space has no counts, so conditional probabilities are not shown."))
    for side, heading, group in sides:
        order = np.argsort(group, kind="stable")
        parts += [Heading(heading), label_graph(f"graph-{side}", heading, space, shown, group, conditional)]
        if conditional.any():
            parts.append(_heat_map(side, [space.names[k] for k in shown[order]], conditional[np.ix_(order, order)]))
    return Section("groups", title, [*parts, *_overfitting(files)])


def conditional_probability(space: LabelSpace, shown: np.ndarray) -> np.ndarray:
    """Return p(b|a) = images with both / images with a of the labels `shown`, f64[a,b]; 0 if a == b or undefined."""
    counts = space.together[shown][:, shown].toarray().astype(np.float64)
    return counts / np.maximum(space.positives[shown], 1)[:, None]


def _explain(space: LabelSpace, shown: int) -> str:
    text = (
        f"Computed from the labels of {space.images:,} training images. A line connects two labels a and b if "
        f"p(b|a), the share of images with a that also have b, or p(a|b) is at least {STRONG:g}. Lines within a "
        "group have its color, lines between groups are gray."
    )
    if shown < len(space.names):
        text += f" Of {len(space.names):,} labels, the {shown} most frequent are shown."
    return text


def label_graph(
    name: str, title: str, space: LabelSpace, shown: np.ndarray, group: np.ndarray, conditional: np.ndarray
) -> LabelGraph:
    """Return the labels on a circle, ordered by group, with edges for the largest conditional probabilities."""
    order = np.argsort(group, kind="stable")
    used = np.unique(group)
    places = np.empty(len(order))
    places[order] = np.arange(len(order)) + _GAP * np.searchsorted(used, group[order])
    around = 2 * math.pi / (len(order) + _GAP * len(used))
    angle = places * around - math.pi / 2
    nodes = [
        {
            "name": space.names[k],
            "x": round(math.cos(turn), 4),
            "y": round(math.sin(turn), 4),
            "angle": round(math.degrees(turn), 2),
            "group": int(of) + 1,
            "color": color(of),
            "positives": int(space.positives[k]),
        }
        for k, turn, of in zip(shown, angle, group, strict=True)
    ]
    edges = [_edge(nodes, a, b, conditional) for a, b in _strongest(conditional)]
    arcs = [_arc(angle[group == of], around, int(of)) for of in used] if len(used) > 1 else []
    alt = (
        f"{title}: {len(nodes)} labels in {len(used)} groups on a circle, {len(edges)} lines between labels that "
        "occur together"
    )
    longest = max((len(node["name"]) for node in nodes), default=0)
    font = _FONT if len(nodes) > FEW_LABELS else _LARGE_FONT
    reach = 1.08 + 0.6 * font * min(longest, LONGEST_NAME)
    return LabelGraph(name, title, nodes, edges, arcs, round(reach, 3), font, alt)


def color(group: int) -> int:
    """Return the index of a group's color in the palette of the page, 1 … 8."""
    return int(group) % 8 + 1


def _strongest(conditional: np.ndarray) -> Sequence[tuple[int, int]]:
    """Return the pairs a < b whose larger conditional probability is at least STRONG, the largest first."""
    larger = np.triu(np.maximum(conditional, conditional.T), 1)
    a, b = np.nonzero(larger >= STRONG)
    order = np.argsort(-larger[a, b], kind="stable")[:MOST_EDGES]
    return [(int(a[k]), int(b[k])) for k in order]


def _edge(nodes: Sequence[dict[str, Any]], a: int, b: int, conditional: np.ndarray) -> dict[str, Any]:
    if conditional[a, b] < conditional[b, a]:
        a, b = b, a
    start, end = nodes[a], nodes[b]
    bend = 0.35  # towards the center, so that lines between neighbors do not coincide with the circle
    middle = [round(bend * (start[axis] + end[axis]) / 2, 4) for axis in ("x", "y")]
    return {
        "source": a,
        "target": b,
        "color": start["color"] if start["group"] == end["group"] else None,
        "path": f"M{start['x']} {start['y']} Q{middle[0]} {middle[1]} {end['x']} {end['y']}",
        "p": round(float(conditional[a, b]), 4),
        "text": f"p({end['name']} | {start['name']}) = {conditional[a, b]:.2f}, reverse {conditional[b, a]:.2f}",
    }


def _arc(angles: np.ndarray, around: float, group: int) -> dict[str, Any]:
    """Return a ring segment inside the labels of one group, and the position of its number."""
    radius, first, last = 0.94, angles.min() - 0.42 * around, angles.max() + 0.42 * around
    (x0, y0), (x1, y1) = ((round(radius * math.cos(t), 4), round(radius * math.sin(t), 4)) for t in (first, last))
    large = int(last - first > math.pi)
    middle = (first + last) / 2
    return {
        "path": f"M{x0} {y0} A{radius} {radius} 0 {large} 1 {x1} {y1}",
        "x": round(0.86 * math.cos(middle), 4),
        "y": round(0.86 * math.sin(middle), 4),
        "group": group + 1,
        "color": color(group),
    }


def _heat_map(side: str, names: Sequence[str], conditional: np.ndarray) -> Charts:
    rows = [
        {
            "x": names[b],
            "y": names[a],
            "value": round(float(conditional[a, b]), 3),
            "text": f"p({names[b]} | {names[a]}) = {conditional[a, b]:.3f}",
        }
        for a, b in np.argwhere(conditional >= _SMALLEST)
    ]
    alt = f"Heat map of p(b|a) for {len(names)} labels, ordered by {side.upper()} group"
    spec = charts.heat_map(rows, x=names, y=names, value_title="", x_title="b", y_title="a")
    return Charts([Chart(f"heat-{side}", "p(b | a), ordered by group (full color: 1)", spec, alt, wide=True)])


def _overfitting(files: RunFiles) -> list[Any]:
    rows = files.cooccurrence
    if not rows:
        note = "cooccurrence.csv is missing; an evaluation writes it if any pairs occur together in training."
        return [Heading("Co-occurrence overfitting"), Note(note)]
    numeric = {name: name not in _NAMES and all(_is_number(row[name]) for row in rows) for name in rows[0]}
    columns = [(name, "number" if is_number else "text") for name, is_number in numeric.items()]
    cells = [[_cell(row[name], numeric[name]) for name in numeric] for row in rows]
    caption = "Contents of cooccurrence.csv. Click a column heading to sort."
    return [Heading("Co-occurrence overfitting"), SortableTable("cooccurrence-table", columns, cells, caption)]


def _is_number(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True


def _cell(text: str, is_number: bool) -> float | str | None:
    if not is_number:
        return text
    value = float(text or "nan")
    return value if math.isfinite(value) else None
