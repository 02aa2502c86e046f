"""adapters: the training steps of LoRA and of deep prompts on one backbone, in alternating rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

from benchmarks import harness
from benchmarks.suites import step
from benchmarks.suites.cases import METHODS, Settings, case, key, model_of, sizes_of

BASE, OTHERS = "vpt", ("lora",)


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table of images/s and seconds per step, and of their ratio to deep prompts."""
    ours, rows = workers.sides[0], []
    sides = [replace(ours, name=METHODS[name], options=ours.options | {"method": name}) for name in (BASE, *OTHERS)]
    backbones = dict.fromkeys(model_of(model)[1] for model in settings.models)
    vits = [name for name in backbones if "vit" in name]
    sizes = itertools.product(vits, settings.resolutions, settings.dtypes, settings.batches)
    for backbone, resolution, dtype, batch in sizes:
        of = case(f"{BASE}@{backbone}", "train", batch=batch, resolution=resolution, dtype=dtype)
        given = (workers, sides, of, settings.rounds)
        if measured := results.measure("adapters", key(of, *OTHERS), harness.rounds_of, *given):
            rows += [[sizes_of(of), *line[1:7]] for line in step.lines(of, measured)]
    for side in sides:
        workers.discard(side)
    columns = ("", "type", "batch", "adapter", "images/s", "s/step", "times VPT")
    notes = ["LoRA: rank 8 on queries and values. VPT: 30 prompts per block."]
    return [harness.table("Training with adapters", columns, rows, notes)]
