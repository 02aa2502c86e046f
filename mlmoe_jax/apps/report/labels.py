"""The section about the labels: groups and co-occurrence."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Note, PageTable, Section
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.data.labels.graph import conditional_probabilities
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.runs.folder import COOCCURRENCE

MOST_LABELS = 80  # labels in a heat map
_SMALLEST = 0.005  # minimum p(b|a) of a cell in the heat map
_TEXT = ("split", "a", "b")  # columns of cooccurrence.csv with names
_COUNTS = ("support", "images_both", "images_a_only", "images_b_only", "images_neither")


def groups(files: RunFiles) -> Section:
    """Return CO and DC groups with p(b|a) as heat maps, and the table of co-occurrence overfitting."""
    title, space = "Label groups and co-occurrence", files.label_space
    if space is None:
        return Section("groups", title, missing="label_space.npz is written when training starts.")
    frequent = np.sort(np.argsort(-space.positives, kind="stable")[:MOST_LABELS])
    text = (
        f"Computed from the labels of {space.images:,} training images. p(b|a) is the share of images with a that also "
        "have b."
    )
    if len(frequent) < len(space.names):
        text += f" Of {len(space.names):,} labels, the heat maps show the {len(frequent)} most frequent."
    parts: list[Any] = [Note(text)]
    sides = {"Co-occurrence groups (CO)": space.co_group, "Discriminative groups (DC)": space.dc_group}
    if all(len(np.unique(group)) == 1 for group in sides.values()):
        parts.append(Note("This model does not group its labels."))
        sides = {"Labels that occur together": space.co_group}
    else:
        parts.append(_group_table(space, sides))
    maps = [_heat_map(f"heat-{n}", *side, space, frequent) for n, side in enumerate(sides.items())]
    return Section("groups", title, [*parts, Charts(maps), _overfitting(files)])


def _group_table(space: LabelSpace, sides: dict[str, np.ndarray]) -> PageTable:
    rows = []
    for heading, group in sides.items():
        for number in np.unique(group):
            members = np.flatnonzero(group == number)
            names = ", ".join(space.names[k] for k in members[:MOST_LABELS]) + ", …" * (len(members) > MOST_LABELS)
            rows.append([heading, int(number) + 1, len(members), names])
    columns = [("side", "text"), ("group", "count"), ("size", "count"), ("labels", "text")]
    return PageTable("group-table", columns, rows)


def conditional_probability(space: LabelSpace, labels: np.ndarray) -> np.ndarray:
    """Return p(b|a) = images with both / images with a of `labels`, f64[a,b]; 0 if a == b or undefined."""
    return conditional_probabilities(space.together[labels][:, labels].toarray(), space.positives[labels])


def _heat_map(name: str, heading: str, group: np.ndarray, space: LabelSpace, labels: np.ndarray) -> Chart:
    labels = labels[np.argsort(group[labels], kind="stable")]
    names, conditional = [space.names[k] for k in labels], conditional_probability(space, labels)
    rows = [
        {
            "x": names[b],
            "y": names[a],
            "value": round(float(conditional[a, b]), 3),
            "text": f"p({names[b]} | {names[a]}) = {conditional[a, b]:.3f}",
        }
        for a, b in np.argwhere(conditional >= _SMALLEST)
    ]
    alt = f"Heat map of p(b|a) for {len(names)} labels. {heading}"
    spec = charts.heat_map(rows, names=names, x_title="b", y_title="a")
    return Chart(name, f"p(b | a), full color: 1. {heading}", spec, alt)


def _overfitting(files: RunFiles) -> PageTable | Note:
    if not (rows := files.table(COOCCURRENCE)):
        return Note("cooccurrence.csv is missing; an evaluation writes it if any pairs occur together in training.")
    columns = [(name, "text" if name in _TEXT else "count" if name in _COUNTS else "number") for name in rows[0]]
    caption = "Co-occurrence overfitting: contents of cooccurrence.csv."
    return PageTable("cooccurrence-table", columns, [list(row.values()) for row in rows], caption)
