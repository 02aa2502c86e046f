"""The section about the labels: groups and co-occurrence."""

from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Note, PageTable
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.data.labels.graph import conditional_probabilities
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.runtime.text import quantity

MOST_MAPPED = 80  # labels in a heat map
_SMALLEST = 0.005  # minimum p(b|a) of a cell in the heat map
_TEXT = ("split", "a", "b")  # columns of cooccurrence.csv with names
_COUNTS = ("support", "images_both", "images_a_only", "images_b_only", "images_neither")


def groups(files: RunFiles) -> list[Any]:
    """Return the table of co-occurrence (CO) and discriminative (DC) groups, heat maps of p(b|a), and overfitting."""
    space = files.label_space
    frequent = np.sort(np.argsort(-space.positives, kind="stable")[:MOST_MAPPED])
    text = (
        f"Computed from the labels of {space.images:,} training images. p(b|a) is the share of images with a that also "
        f"have b. Of {quantity(len(space.names), 'label')}, the heat maps show the {len(frequent)} most frequent."
    )
    parts: list[Any] = [Note(text)]
    if space.co_group.any() or space.dc_group.any():
        sides = {"Co-occurrence groups (CO)": space.co_group, "Discriminative groups (DC)": space.dc_group}
        parts.append(_group_table(space, sides))
    else:  # the model does not group its labels
        sides = {"Labels that occur together": space.co_group}
    maps = [_heat_map(f"heat-{n}", *side, space, frequent) for n, side in enumerate(sides.items())]
    return [*parts, Charts(maps), *_overfitting(files)]


def _group_table(space: LabelSpace, sides: dict[str, np.ndarray]) -> PageTable:
    rows = []
    for heading, group in sides.items():
        for number in np.unique(group):
            members = np.flatnonzero(group == number)
            names = ", ".join(space.names[k] for k in members[:MOST_MAPPED]) + ", …" * (len(members) > MOST_MAPPED)
            rows.append([heading, int(number) + 1, len(members), names])
    columns = ["side", ("group", "count"), ("size", "count"), "labels"]
    return PageTable("group-table", columns, rows)


def _heat_map(name: str, heading: str, group: np.ndarray, space: LabelSpace, labels: np.ndarray) -> Chart:
    labels = labels[np.argsort(group[labels], kind="stable")]
    names, together = [space.names[k] for k in labels], space.together[labels][:, labels]
    conditional = conditional_probabilities(together.toarray(), space.positives[labels])
    rows = [
        {
            "a": names[a],
            "b": names[b],
            "value": round(float(conditional[a, b]), 3),
            "text": f"p({names[b]} | {names[a]}) = {conditional[a, b]:.3f}",
        }
        for a, b in np.argwhere(conditional >= _SMALLEST)
    ]
    alt = f"Heat map of p(b|a) for {len(names)} labels. {heading}"
    spec = charts.heat_map(rows, names)
    return Chart(name, f"p(b | a), full color: 1. {heading}", spec, alt)


def _overfitting(files: RunFiles) -> list[PageTable]:
    """Return the table of co-occurrence overfitting, one row per pair of labels; [] if cooccurrence.csv is missing.

    An evaluation writes this file if there are pairs of labels that occur together in training.
    """
    if not (rows := files.pairs):
        return []
    columns = [name if name in _TEXT else (name, "count" if name in _COUNTS else "number") for name in rows[0]]
    caption = "Co-occurrence overfitting: contents of cooccurrence.csv."
    return [PageTable("cooccurrence-table", columns, [list(row.values()) for row in rows], caption)]
