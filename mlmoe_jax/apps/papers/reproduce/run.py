"""`--mode=reproduce`: train the runs of a published table that are missing, and compare all with the paper.

    --mode=reproduce --table=mlvpt.4 --root=/data/coco
    --mode=reproduce --table=drmoe.1 --dataset=digits

All tables share one folder, in which each run has its own: a run that exists is read, and not trained again. Several
processes can work on it at the same time, see `sweep.execute`.
"""

from __future__ import annotations

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers.reproduce.commands import Request, commands_after
from mlmoe_jax.apps.papers.reproduce.measure import Measurements, Outcome
from mlmoe_jax.apps.papers.reproduce.output import figure, format_text, listed, write_tables
from mlmoe_jax.apps.papers.sweep.execute import execute, require_no_errors
from mlmoe_jax.apps.papers.sweep.grid import Point, planned
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import to_json


def reproduce(request: Request, folder: RunFolder, *, as_json: bool = False) -> int:
    """Train the missing runs of a table, write its CSV, Markdown and figure to `folder`, and print it.

    Files have all rows of the table; rows that were not requested are filled in from runs that are there. Returns 0, or
    130 after SIGTERM or Ctrl-C. Raises UserError before the first run if one of them cannot be trained in its folder,
    and at the end if some have failed; a failed run does not stop the others.
    """
    points = [
        Point(run.name, {}, configuration.load_config(run.reference, request.overrides_of(run))) for run in request.runs
    ]
    runs, measurements, result = planned(points, folder), Measurements(request, folder), request.result
    if not execute(runs, folder, lambda: write_tables(request, _outcomes(measurements, result.rows), folder)):
        return 130
    outcomes = _outcomes(measurements, request.rows)
    if distributed.is_first():
        image = figure(request, _outcomes(measurements, result.rows)) if result.x else None
        if image is not None:
            with folder.writing(wait=True):
                folder.write_bytes(f"{request.name}.png", image)
        print(to_json(listed(request, outcomes), indent=2) if as_json else format_text(request, outcomes))
    for command in commands_after(request, str(folder)):
        status(f"the figure itself: {command}")
    status(f"tables and runs: {folder}")
    require_no_errors(runs)
    return 0


def _outcomes(measurements: Measurements, rows) -> list[Outcome]:
    return [measurements.outcome(row) for row in rows]
