"""data: decoding, resizing and augmenting on one thread, beside PyTorch's DataLoader, and on all cores."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings
from benchmarks.suites.photos import photo_files

ONE_THREAD = {"threads": 1, "workers": 0}
PUBLISHED = {"cutout": 0.5, "randaugment": "uda"}
REDUCED = {"reduced_decoding": True}
# name -> changes to config.data and to config.augment
OURS = {
    "decode + resize": ({}, {}),
    "decode + resize, reduced decoding": (REDUCED, {}),
    "with cutout and RandAugment": ({}, PUBLISHED),
    "with cutout and RandAugment, reduced decoding": (REDUCED, PUBLISHED),
    "with cutout and RandAugment, all cores": ({"threads": -1, "workers": -1}, PUBLISHED),
}
# name -> kind and `full` of peers/loader.py
PYTORCH = {
    "decode + resize, Pillow": ("pil", False),
    "decode + resize, v2": ("v2", False),
    "decode + resize, v2, its decoder": ("v2-decode", False),
    "with cutout and RandAugment, Pillow": ("pil", True),
    "with erasing and RandAugment, v2": ("v2", True),
}


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table of images/s, and the difference of reduced decoding."""
    size, duration = (32, 0.1) if settings.quick else (settings.resolutions[0], 3.0)
    with photo_files(settings, most=120) as files:
        number = f"{len(files)} files, {size} px, {_name_of(files) if settings.photos else 'drawn'}"
        sides = ", ".join(side.name for side in workers.sides)
        name = f"{number} | {sides}"
        measured = results.measure("data", name, _measured, settings, workers, files, size, duration)
    if measured is None:
        return []
    first = next(iter(measured["speeds"].values()))
    rows = []
    for name, values in measured["speeds"].items():
        if "error" in values:
            rows.append([name, values["error"]])
            continue
        pairs = [a / b for a, b in zip(values, first, strict=True)]
        rows.append([name, harness.Spread.of(values).text(), harness.Spread.of(pairs).text()])
    title = f"Input pipeline, one thread unless a row says all cores: {number}"
    notes = [f"Reduced decoding changes a pixel by {measured['gray_levels']:.2f} gray levels on average."]
    return [harness.table(title, ("", "images/s", "times the first row"), rows, notes)]


def _name_of(files: list[str]) -> str:
    return "photographs " + hashlib.sha256("\n".join(files).encode()).hexdigest()[:8]


def _measured(
    settings: Settings, workers: harness.Workers, files: list[str], size: int, duration: float
) -> dict[str, Any]:
    """Return side and row -> images/s of each round, or an error."""
    rows: dict[str, Any] = {}
    for side in workers.sides:
        if side.options.get("compile"):
            continue
        call = functools.partial(workers.of(side).call, "loader", files=files, size=size, seconds=duration)
        for name, changes in (OURS if side.ours else PYTORCH).items():
            options = (
                {"data": ONE_THREAD | changes[0], "augment": changes[1]}
                if side.ours
                else dict(zip(("kind", "full"), changes, strict=True))
            )
            rows[f"{side.name}: {name}"] = functools.partial(call, **options)
    speeds: dict[str, Any] = {name: [] for name in rows}
    for _ in range(settings.rounds):
        for name, measure in rows.items():
            if "error" in speeds[name]:
                continue
            try:
                speeds[name].append(measure()["images_per_second"])
            except harness.Failed as failed:
                speeds[name] = {"error": str(failed)}
    first = workers.of(workers.sides[0])
    return {"speeds": speeds, **first.call("reduced_difference", files=files[:50], size=size)}
