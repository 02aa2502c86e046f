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
            if outcome := results.measure("memory", key(of, side.name), workers.alone, side, peak, of):
                start = [title(of), of["mode"], of["dtype"], str(of["batch"]), side.name]
                peaks.append([*start, *harness.cells_of(outcome, _cells)])
    for of in (of for of in step.cases(settings) if of["mode"] == "train" and of["batch"] == settings.batches[-1]):
        name = f"largest {key(of, workers.sides[0].name)}"
        if outcome := results.measure("memory", name, _largest, settings, workers, of):
            fits = outcome.get("error") or f"{outcome['batch']:,}"
            peak_there = harness.gigabytes(outcome.get("device_peak"))
            largest.append([title(of), of["dtype"], harness.gigabytes(outcome.get("capacity")), fits, peak_there])
    columns = ("", "mode", "type", "batch", "side", "peak of the process, GB", "peak of the device, GB")
    return [
        harness.table("Peak memory", (*columns, "temporaries, GB", "arguments, GB"), peaks),
        harness.table(
            "Largest training batch of one device, by the compiler's account",
            ("", "type", "memory, GB", "batch", "peak when it ran, GB"),
            largest,
            ["A batch runs on an accelerator, not on a CPU."],
        ),
    ]


def peak(worker: harness.Worker, of: dict[str, Any]) -> dict[str, Any]:
    """Return a round of a case, and the memory after it."""
    facts, measured = worker.build(of), [worker.ask("round")]
    return {**facts, "batch": of["batch"], "rounds": measured, "peak": worker.ask("memory")}


def _cells(outcome: dict[str, Any]) -> list[str]:
    compiled, peaks = outcome.get("memory", {}), outcome["peak"]
    counts = (peaks["process"], peaks["device"], compiled.get("temporaries"), compiled.get("arguments"))
    return [*map(harness.gigabytes, counts)]


def _compiled(worker: harness.Worker, of: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Return the largest batch for the memory of the accelerator, or half of the memory of the host."""
    capacity = worker.facts["memory"] or harness.machine()["memory_gb"] * 10**9 // 2
    start = of["batch"]
    if quick:  # one compilation: nothing fits one byte
        capacity = start = 1
    return worker.call("largest_batch", case=of, capacity=capacity, start=start) | {"capacity": capacity}


def _largest(settings: Settings, workers: harness.Workers, of: dict[str, Any]) -> dict[str, Any]:
    """Return the largest batch, and on an accelerator the memory when it ran."""
    side = workers.sides[0]
    largest = workers.alone(side, _compiled, of, settings.quick)
    if settings.platform == "cpu" or not largest.get("batch"):
        return largest
    ran = workers.alone(side, peak, of | {"batch": largest["batch"], "devices": 1})
    return largest | ({"error": ran["error"]} if "error" in ran else {"device_peak": ran["peak"]["device"]})
