"""attention: the implementation that the package chooses on this device, beside the other implementations."""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, images_per_device, key, sizes_of

# Option of a case -> what computes softmax(QKᵀ/√d)·V.
WAYS = {"chosen": "the package's choice", "matmuls": "its matmuls", "library": "jax.nn.dot_product_attention"}


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table of the attention of one block, forward and backward, on one device."""
    side, rows = workers.sides[0], []
    for dtype in settings.dtypes:
        for resolution in settings.resolutions:
            batch = images_per_device(settings, resolution)
            of = case(settings.models[0], "attention", batch=batch, resolution=resolution, dtype=dtype)
            outcome = results.measure("attention", key(of, side.name), _measured, settings, workers, of)
            rows += _lines(of, outcome) if outcome else []
    columns = ("", "type", "batch", "attention by", "ms", "times its matmuls")
    notes = ["One block with its projections, forward and backward to the tokens."]
    return [harness.table("Attention", columns, rows, notes)]


def _measured(settings: Settings, workers: harness.Workers, of: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of each way, one after another in one process, as a TPU allows."""
    side = workers.sides[0]
    return {
        way: harness.rounds_of(workers, [side], of | {"attention": way}, settings.rounds)[side.name] for way in WAYS
    }


def _lines(of: dict[str, Any], measured: dict[str, Any]) -> list[list[str]]:
    start = [sizes_of(of), of["dtype"], str(of["batch"])]
    rows = []
    for way, name in WAYS.items():
        outcome = measured[way]
        if way == "chosen" and "error" not in outcome:
            name += ": cuDNN" if outcome["cudnn"] else ": its matmuls"
        rows.append([*start, name, *harness.cells_of(outcome, _cells, measured["matmuls"])])
    return rows


def _cells(outcome: dict[str, Any], matmuls: dict[str, Any]) -> list[str]:
    spread = harness.Spread.of(1e3 * one["seconds"] for one in outcome["rounds"])
    times = "" if "error" in matmuls else harness.ratio(outcome, matmuls).text()
    return [spread.text() + harness.mark(outcome), times]
