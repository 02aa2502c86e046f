"""`--mode=reproduce`: train the runs of a published table that are missing, and compare all with the paper.

    --mode=reproduce --table=mlvpt.4 --root=/data/coco
    --mode=reproduce --table=drmoe.1 --dataset=digits

All tables share one folder, in which each run has its own: a run that exists is read, and not trained again. Several
processes can work on it at the same time, see `engine`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers.engine import execute, planned, require_no_errors
from mlmoe_jax.apps.papers.grid import Point
from mlmoe_jax.apps.papers.measure import Measurements, Outcome
from mlmoe_jax.apps.papers.plot import Mark, draw
from mlmoe_jax.apps.papers.request import Request, commands_after
from mlmoe_jax.apps.papers.tables import format_text, heading, listed, write_tables
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import status


def reproduce(request: Request, folder: RunFolder, *, as_json: bool = False) -> int:
    """Train the missing runs of a table, write its CSV, Markdown and figure to `folder`, and print it.

    Files have all rows of the table; rows that were not requested are filled in from runs that exist. A failed run does
    not stop the remaining runs.

    Returns:
      The exit code: 0, or 130 after SIGTERM or Ctrl-C.

    Raises:
      UserError: before the first run if a run cannot be trained in its folder, and at the end if runs have failed.
    """
    points = [
        Point(run.name, {}, configuration.load_config(run.reference, request.overrides_of(run))) for run in request.runs
    ]
    runs, measurements = planned(points, folder), Measurements(request, folder)

    def all_rows() -> list[Outcome]:
        return [measurements.outcome(row) for row in request.result.rows]

    if not execute(runs, folder, lambda: write_tables(request, all_rows(), folder)):
        return 130
    shown = [measurements.outcome(row) for row in request.rows]
    if distributed.is_first():
        image = figure(request, all_rows()) if request.result.x else None
        if image is not None:
            with folder.writing(wait=True):
                folder.write_bytes(f"{request.name}.png", image)
        print(to_json(listed(request, shown), indent=2) if as_json else format_text(request, shown))
    for command in commands_after(request, str(folder)):
        status(f"the figure itself: {command}")
    status(f"tables and runs: {folder}")
    require_no_errors(runs)
    return 0


def figure(request: Request, outcomes: Sequence[Outcome]) -> bytes | None:
    """Draw a figure of the paper with the published points and ours, as PNG; None if there is nothing to draw.

    There is one panel per metric, such as mAP, CF1 and OF1, over the axis of the figure, and one line per data set. If
    the axis is the labels, the columns of the rows are its points.
    """
    marks = list(_marks(request, outcomes))
    if all(math.isnan(mark.y) for mark in marks):
        return None
    return draw(marks, x_label=request.result.x.rpartition(".")[2], y_label="%", title=heading(request))


def _marks(request: Request, outcomes: Sequence[Outcome]) -> Iterator[Mark]:
    over_labels = request.result.x == "label"
    for outcome in outcomes:
        row = outcome.row
        if row.over is not None and not over_labels:
            continue
        for column, number in row.numbers.items():
            panel, x = ("AP", column.removeprefix("AP ")) if over_labels else (column, row.x)
            line = row.settings["method" if over_labels else "dataset"]
            here = line if over_labels else request.dataset or line
            published = math.nan if number.value is None else number.value
            yield Mark(panel, f"{line}, published", x, published)
            ours, spread = outcome.ours.get(column, math.nan), outcome.spread.get(column, 0.0)
            yield Mark(panel, f"{here}, ours", x, ours, spread)
