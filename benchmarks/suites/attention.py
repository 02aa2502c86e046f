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
            options = {"part": "attention", "backward": True}
            of = case(settings.models[0], "part", batch=batch, resolution=resolution, dtype=dtype, **options)
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
        if "error" in outcome:
            rows.append([*start, name, outcome["error"]])
            continue
        if way == "chosen":
            name += ": cuDNN" if outcome["cudnn"] else ": its matmuls"
        spread = harness.seconds(outcome)
        times = "" if "error" in measured["matmuls"] else harness.ratio(outcome, measured["matmuls"]).text()
        milliseconds = harness.Spread(*(1e3 * value for value in (spread.median, spread.least, spread.most))).text()
        rows.append([*start, name, milliseconds + harness.mark(outcome), times])
    return rows
