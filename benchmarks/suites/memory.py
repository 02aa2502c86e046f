"""memory: the peak of training and inference, in one process per number, and the largest batch that fits."""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.suites import step
from benchmarks.suites.cases import Settings, key, title


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table of peaks, and one of largest batches."""
    workers.close()  # their memory would reduce the free memory
    peaks, largest = [], []
    for of in step.cases(settings):
        if of["mode"] == "predict":
            continue
        for side in workers.sides:
            if not step.takes_part(side, of):
                continue
            outcome = results.measure("memory", key(of, side.name), lambda of=of, side=side: peak(workers, side, of))
            if outcome:
                peaks.append(_line(of, side.name, outcome))
    for of in _largest_cases(settings):
        side = workers.sides[0]
        outcome = results.measure(
            "memory", "largest " + key(of, side.name), lambda of=of, side=side: _largest(settings, workers, side, of)
        )
        if outcome:
            fits = outcome.get("error") or f"{outcome['batch']:,}"
            peak_there = harness.gigabytes(outcome.get("device_peak"))
            largest.append([title(of), of["dtype"], harness.gigabytes(outcome.get("capacity")), fits, peak_there])
    columns = ("", "mode", "type", "batch", "side", "peak of the process, GB", "peak of the device, GB")
    tables = [
        harness.table("Peak memory", (*columns, "temporaries, GB", "arguments, GB"), peaks),
        harness.table(
            "Largest training batch of one device, by the compiler's account",
            ("", "type", "memory, GB", "batch", "peak when it ran, GB"),
            largest,
            ["A batch runs on an accelerator, not on a CPU."],
        ),
    ]
    return [text for text, rows in zip(tables, (peaks, largest), strict=True) if rows]


def peak(workers: harness.Workers, side: harness.Side, of: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of a case in a new process, after one round."""
    with workers.fresh(side) as worker:
        try:
            facts = worker.build(of)
            worker.ask("round")
            return {**facts, "peak": worker.ask("memory")}
        except harness.Failed as failed:
            return {"error": str(failed)}


def _line(of: dict[str, Any], side: str, outcome: dict[str, Any]) -> list[str]:
    start = [title(of), of["mode"], of["dtype"], str(of["batch"]), side]
    if "error" in outcome:
        return [*start, outcome["error"], "", "", ""]
    compiled = outcome.get("memory", {})
    counts = (
        outcome["peak"]["process"],
        outcome["peak"]["device"],
        compiled.get("temporaries"),
        compiled.get("arguments"),
    )
    return [*start, *map(harness.gigabytes, counts)]


def _largest_cases(settings: Settings) -> list[dict[str, Any]]:
    cases = [of for of in step.cases(settings) if of["mode"] == "train"]
    return [of for of in cases if of["batch"] == settings.batches[-1]]


def _largest(settings: Settings, workers: harness.Workers, side: harness.Side, of: dict[str, Any]) -> dict[str, Any]:
    """Return the largest batch for the memory of the accelerator, or half of the memory of the host."""
    with workers.fresh(side) as worker:
        capacity = worker.facts["memory"] or harness.machine()["memory_gb"] * 10**9 // 2
        start = of["batch"]
        if settings.quick:  # one compilation: nothing fits one byte
            capacity = start = 1
        try:
            largest = worker.call("largest_batch", case=of, capacity=capacity, start=start) | {"capacity": capacity}
        except harness.Failed as failed:
            return {"error": str(failed)}
    if settings.platform == "cpu" or not largest["batch"]:
        return largest
    ran = peak(workers, side, of | {"batch": largest["batch"], "devices": 1})
    return largest | ({"error": ran["error"]} if "error" in ran else {"device_peak": ran["peak"]["device"]})
