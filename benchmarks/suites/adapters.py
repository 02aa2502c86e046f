"""adapters: the training steps of LoRA and of deep prompts on one backbone, in alternating rounds."""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, key, model_of, title

BASE, OTHERS = "vpt", ("lora",)


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table of the seconds per step, and of their ratio to deep prompts."""
    side, rows = workers.sides[0], []
    backbones = dict.fromkeys(model_of(model)[1] for model in settings.models)
    for backbone in (name for name in backbones if "vit" in name):
        for resolution in settings.resolutions:
            for dtype in settings.dtypes:
                for batch in settings.batches:
                    sizes = {"batch": batch, "resolution": resolution, "dtype": dtype}
                    cases = {name: case(f"{name}@{backbone}", "train", **sizes) for name in (BASE, *OTHERS)}
                    name = key(cases[BASE], *OTHERS)
                    measured = results.measure(
                        "adapters", name, lambda cases=cases: _paired(workers, side, cases, settings.rounds)
                    )
                    rows += _lines(cases, measured) if measured else []
    notes = ["LoRA: rank 8 on queries and values. VPT: 30 prompts per block."]
    columns = ("", "type", "batch", "s/step", "times VPT")
    return [harness.table("Training with adapters", columns, rows, notes)]


def _paired(
    workers: harness.Workers, side: harness.Side, cases: dict[str, dict[str, Any]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Measure each case in its own process; the order is reversed from round to round."""
    started = {name: workers.fresh(side) for name in cases}
    try:
        outcomes = {name: {**worker.build(cases[name]), "rounds": []} for name, worker in started.items()}
        for number in range(rounds):
            for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
                outcomes[name]["rounds"].append(started[name].ask("round"))
        return outcomes
    finally:
        for worker in started.values():
            worker.close()


def _lines(cases: dict[str, dict[str, Any]], measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, of in cases.items():
        against = "" if name == BASE else harness.ratio(measured[BASE], measured[name]).text()
        seconds = harness.seconds(measured[name]).text() + harness.mark(measured[name])
        rows.append([title(of), of["dtype"], str(of["batch"]), seconds, against])
    return rows
