"""kernels: each kernel of models/layers/dispatch.py beside XLA's own operation, with gradients, on this device."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, key

WAYS = ("auto", "xla")  # values of model.kernels


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table with one row per operation, type, batch and resolution."""
    side, rows = workers.sides[0], []
    parts = workers.of(side).call("kernel_cases")["cases"]
    for dtype in settings.dtypes:
        for batch, resolution in itertools.product(settings.batches, settings.resolutions):
            for part in parts:
                of = case(settings.models[0], "kernel", batch=batch, resolution=resolution, dtype=dtype, part=part)
                if outcome := results.measure("kernels", key(of, side.name), _measured, settings, workers, of):
                    rows.append([part, f"{resolution} px", dtype, str(batch), *_cells(outcome)])
    columns = ("", "images", "type", "batch", "auto, ms", "xla, ms", "times the speed of xla")
    return [harness.table("Kernels", columns, rows, ["One operation with its gradients by all inputs."])]


def _measured(settings: Settings, workers: harness.Workers, of: dict[str, Any]) -> dict[str, Any]:
    side = workers.sides[0]
    return {way: harness.rounds_of(workers, [side], of | {"kernels": way}, settings.rounds)[side.name] for way in WAYS}


def _cells(measured: dict[str, Any]) -> list[str]:
    times = [harness.cells_of(measured[way], _milliseconds)[0] for way in WAYS]
    failed = any("error" in measured[way] for way in WAYS)
    return [*times, "" if failed else harness.ratio(measured["auto"], measured["xla"]).text()]


def _milliseconds(outcome: dict[str, Any]) -> list[str]:
    return [harness.Spread.of(1e3 * one["seconds"] for one in outcome["rounds"]).text() + harness.mark(outcome)]
