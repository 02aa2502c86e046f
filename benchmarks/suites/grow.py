"""grow: time and memory of a training step as one size grows; each number is from its own process."""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, key
from benchmarks.suites.memory import peak


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table per axis."""
    side, tables = workers.sides[0], []
    devices = len(workers.of(side).facts["devices"])
    workers.close()
    for axis, values in settings.axes.items():
        if axis == "devices":
            values = tuple(2**power for power in range(devices.bit_length()))
        rows = []
        for value in values:
            of = _case(settings, axis, value)
            given = (side, peak, of, min(3, settings.rounds))
            outcome = results.measure("grow", key(of, side.name), workers.alone, *given)
            if outcome:
                rows.append([f"{value:,}", *harness.cells_of(outcome, _cells)])
        columns = (axis, "s/step", "images/s", "GFLOP", "temporaries, GB", "arguments, GB", "peak of the process, GB")
        tables.append(harness.table(f"Growing {axis}", (*columns, "peak of the device, GB"), rows))
    return tables


def _case(settings: Settings, axis: str, value: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"batch": settings.batches[0], "resolution": settings.resolutions[0]}
    changes = {"groups": 5, "per_group": value // 10} if axis == "prompts" else {axis: value}
    sizes |= {name: changes.pop(name) for name in ("batch", "resolution") if name in changes}
    return case(settings.models[0], "train", **sizes, dtype=settings.dtypes[0], **changes)


def _cells(outcome: dict[str, Any]) -> list[str]:
    spread, memory = harness.seconds(outcome), outcome["memory"]
    counts = (memory["temporaries"], memory["arguments"], outcome["peak"]["process"], outcome["peak"]["device"])
    rate = harness.number(outcome["batch"] / spread.median)
    speeds = [spread.text() + harness.mark(outcome), rate, harness.number(outcome["flops"] / 1e9)]
    return [*speeds, *map(harness.gigabytes, counts)]
