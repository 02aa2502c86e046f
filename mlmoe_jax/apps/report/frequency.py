"""The average precision of labels by their number of training images: do rare labels do worse?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Heading, Note, Table
from mlmoe_jax.apps.report.resampling import Resampled
from mlmoe_jax.apps.report.run_files import Evaluated, RunFiles
from mlmoe_jax.runtime.text import percent

FEWEST = 6  # labels with an AP, two per third
MOST_POINTS = 1000  # labels in the chart
THIRDS = ("rare", "medium", "frequent")


def by_frequency(files: RunFiles, main: Evaluated, resampled: Resampled | None = None) -> list[Any]:
    """Return the mAP of the rare, medium and frequent third of the labels, and the AP over their training images.

    [] if the number of training images is unknown, or for fewer than FEWEST labels with an average precision.
    """
    space = files.label_space
    if space is None or not space.positives.any() or [row["label"] for row in main.per_class] != list(space.names):
        return []
    ap = np.array([float(row["AP"]) if row.get("AP") else math.nan for row in main.per_class])
    known = np.flatnonzero(~np.isnan(ap))
    if len(known) < FEWEST:
        return []
    order = known[np.argsort(space.positives[known], kind="stable")]
    rows = []
    for name, labels in zip(THIRDS, np.array_split(order, 3), strict=True):
        mean = float(ap[labels].mean())
        ends = resampled.mean_ap(labels, mean) if resampled else None
        interval = f"{percent(ends[0])} to {percent(ends[1])}" if ends else "–"
        counts = space.positives[labels]
        rows.append([name, f"{counts.min():,} to {counts.max():,}", str(len(labels)), percent(mean), interval])
    columns = ("third", "training images", "labels", "mAP %", "95 % interval")
    text = (
        "Labels by the number of their training images, in three parts of equal size; mAP is the mean of their average "
        f"precision on {main.name}."
    )
    points = [
        {"label": space.names[k], "images": int(space.positives[k]), "value": round(float(ap[k]), 5)}
        for k in order[:: -(-len(order) // MOST_POINTS)]
    ]
    alt = f"Average precision over training images for {len(points)} labels"
    title = "Average precision over the number of training images"
    chart = Chart("ap-frequency", title, charts.label_frequency(points), alt, wide=True)
    return [Heading("By frequency in training"), Note(text), Table(columns, rows, text=(0,)), Charts([chart])]
