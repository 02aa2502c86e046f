"""agreement: forward and backward pass against stored arrays, and at full size against the CPU, per precision."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, key, title

# Type and precision of the products -> the largest differences of logits and loss, and of gradients, relative to the
# largest entry. `default` is the device's fastest: TF32 on an NVIDIA GPU, one pass in bfloat16 on a TPU. In
# bfloat16, ML-VPT on DINOv2-B differs by 9e-3 and 2.5e-2 on a CPU, from rounding alone.
LIMITS = {
    ("float32", "highest"): (1e-4, 1e-3),
    ("float32", "default"): (5e-2, 1e-1),
    ("bfloat16", "default"): (5e-2, 1e-1),
}
AUTHORS = "tiny ML-VPT, the authors' code"


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table with one row per reference and precision."""
    side, rows = workers.sides[0], []
    workers.close()  # a TPU belongs to one process
    with workers.fresh(side) as worker:
        for dtype, precision in LIMITS:
            name = f"{AUTHORS} {dtype} {precision} {side.name}"
            measured = results.measure("agreement", name, _authors, worker, dtype, precision)
            rows += _lines(AUTHORS, measured)
    sizes = {"batch": min(4, settings.batches[0]), "resolution": settings.resolutions[0]}
    of = case(settings.models[0], "differentiate", **sizes, dtype="float32", precision="highest")
    if outcomes := results.measure("agreement", key(of, side.name), _full_size, workers, of):
        for outcome in outcomes["precisions"]:
            rows += _lines(f"{title(of)}, this package on the CPU", outcome)
    columns = ("reference", "type", "precision", "loss", "logits", "at most", "gradients", "at most", "")
    notes = ["Largest differences relative to the largest entry of the reference, which is in float32 on a CPU."]
    return [harness.table("Agreement", columns, rows, notes)]


def agrees(outcome: dict[str, Any]) -> bool:
    """Return whether the differences of one row are within LIMITS."""
    forward, backward = LIMITS[outcome["dtype"], outcome["precision"]]
    return max(outcome["loss"], outcome["logits"]) <= forward and outcome["gradients"] <= backward


def _authors(worker: harness.Worker, dtype: str, precision: str) -> dict[str, Any]:
    sizes = {"dtype": dtype, "precision": precision}
    return sizes | worker.call("authors_differences", **sizes)


def _full_size(workers: harness.Workers, of: dict[str, Any]) -> dict[str, Any]:
    """Compute the results on the CPU, then the differences of each precision on the device."""
    side = workers.sides[0]
    on_cpu = replace(side, environment=side.environment | {"JAX_PLATFORMS": "cpu"})
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/results.npz"
        with workers.fresh(on_cpu) as worker:
            worker.call("write_results", case=of, file=file)
        rows = []
        with workers.fresh(side) as worker:
            for dtype, precision in LIMITS:
                sizes = {"dtype": dtype, "precision": precision}
                rows.append(sizes | worker.call("stored_differences", case=of | sizes, file=file))
    return {"precisions": rows}


def _lines(reference: str, outcome: dict[str, Any] | None) -> list[list[str]]:
    if outcome is None:
        return []
    forward, backward = LIMITS[outcome["dtype"], outcome["precision"]]
    loss, logits, gradients = (f"{outcome[name]:.1e}" for name in ("loss", "logits", "gradients"))
    verdict = "agrees" if agrees(outcome) else "**differs**"
    limits = (f"{limit:.0e}" for limit in (forward, backward))
    cells = [loss, logits, next(limits), gradients, next(limits), verdict]
    return [[reference, outcome["dtype"], outcome["precision"], *cells]]
