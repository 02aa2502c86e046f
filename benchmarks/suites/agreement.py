"""agreement: forward and backward pass against stored arrays, and at full size against the CPU, per precision."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, key, title

# Type and precision of the products -> the largest differences of logits and loss, and of gradients, relative to the
# largest entry. `default` is the device's fastest: TF32 on an NVIDIA GPU, one pass in bfloat16 on a TPU. In
# bfloat16, ML-VPT on DINOv2-B differs by 9e-3 and 2.5e-2 on a CPU, from rounding alone.
LIMITS = {
    ("bfloat16", "default"): (5e-2, 1e-1),
    ("float32", "highest"): (1e-4, 1e-3),
    ("float32", "default"): (5e-2, 1e-1),
}
# The quickest to compile first: on an NVIDIA GPU, the programs in float32 take XLA several times as long.
PRECISIONS = [{"dtype": dtype, "precision": precision} for dtype, precision in LIMITS]
EXACT = {"dtype": "float32", "precision": "highest"}
AUTHORS = "tiny ML-VPT, the authors' code"


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table with one row per reference and precision."""
    side, rows = workers.sides[0], []
    workers.close()  # a TPU belongs to one process
    sizes = {"batch": min(4, settings.batches[0]), "resolution": settings.resolutions[0]}
    cases = [case(settings.models[0], "differentiate", **sizes, **change) for change in PRECISIONS]
    ours = f"{title(cases[0])}, this package on the CPU"
    with tempfile.TemporaryDirectory() as folder, workers.fresh(side) as worker:
        for of in cases:
            name = f"{AUTHORS} {of['dtype']} {of['precision']} {side.name}"
            rows += _lines(AUTHORS, results.measure("agreement", name, _authors, worker, of))
        for of in cases:
            given = (workers, worker, of, Path(folder) / "results.npz")
            rows += _lines(ours, results.measure("agreement", key(of, side.name), _full_size, *given))
    columns = ("reference", "type", "precision", "loss", "logits", "at most", "gradients", "at most", "")
    notes = ["Largest differences relative to the largest entry of the reference, which is in float32 on a CPU."]
    return [harness.table("Agreement", columns, rows, notes)]


def agrees(outcome: dict[str, Any]) -> bool:
    """Return whether the differences of one row are within LIMITS."""
    forward, backward = LIMITS[outcome["dtype"], outcome["precision"]]
    return max(outcome["loss"], outcome["logits"]) <= forward and outcome["gradients"] <= backward


def _authors(worker: harness.Worker, of: dict[str, Any]) -> dict[str, Any]:
    precision = _precision(of)
    return precision | worker.call("authors_differences", **precision)


def _full_size(workers: harness.Workers, worker: harness.Worker, of: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the differences from the results in a file, which the CPU computes if the file does not exist."""
    if not file.exists():
        side = worker.side
        on_cpu = replace(side, environment=side.environment | {"JAX_PLATFORMS": "cpu"})
        with workers.fresh(on_cpu) as reference:
            reference.call("write_results", case=of | EXACT, file=str(file))
    return _precision(of) | worker.call("stored_differences", case=of, file=str(file))


def _precision(of: dict[str, Any]) -> dict[str, str]:
    return {"dtype": of["dtype"], "precision": of["precision"]}


def _lines(reference: str, outcome: dict[str, Any] | None) -> list[list[str]]:
    if outcome is None:
        return []
    forward, backward = LIMITS[outcome["dtype"], outcome["precision"]]
    loss, logits, gradients = (f"{outcome[name]:.1e}" for name in ("loss", "logits", "gradients"))
    verdict = "agrees" if agrees(outcome) else "**differs**"
    limits = (f"{limit:.0e}" for limit in (forward, backward))
    cells = [loss, logits, next(limits), gradients, next(limits), verdict]
    return [[reference, outcome["dtype"], outcome["precision"], *cells]]
