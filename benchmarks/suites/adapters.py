"""adapters: the training steps of LoRA and of deep prompts on one backbone, in alternating rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, key, model_of, title

BASE, OTHERS = "vpt", ("lora",)


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table of the seconds per step, and of their ratio to deep prompts."""
    ours, rows = workers.sides[0], []
    sides = [replace(ours, name=name, options=ours.options | {"method": name}) for name in (BASE, *OTHERS)]
    backbones = dict.fromkeys(model_of(model)[1] for model in settings.models)
    vits = [name for name in backbones if "vit" in name]
    sizes = itertools.product(vits, settings.resolutions, settings.dtypes, settings.batches)
    for backbone, resolution, dtype, batch in sizes:
        of = case(f"{BASE}@{backbone}", "train", batch=batch, resolution=resolution, dtype=dtype)
        given = (workers, sides, of, settings.rounds)
        if measured := results.measure("adapters", key(of, *OTHERS), harness.rounds_of, *given):
            rows += _lines(of, measured)
    for side in sides:
        workers.discard(side)
    notes = ["LoRA: rank 8 on queries and values. VPT: 30 prompts per block."]
    columns = ("", "type", "batch", "s/step", "times VPT")
    return [harness.table("Training with adapters", columns, rows, notes)]


def _lines(of: dict[str, Any], measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, outcome in measured.items():
        start = [title(of | {"method": name}), of["dtype"], str(of["batch"])]
        rows.append([*start, *harness.cells_of(outcome, _cells, measured[BASE])])
    return rows


def _cells(outcome: dict[str, Any], base: dict[str, Any]) -> list[str]:
    against = "" if outcome is base or "error" in base else harness.ratio(base, outcome).text()
    return [harness.seconds(outcome).text() + harness.mark(outcome), against]
