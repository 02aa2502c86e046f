"""step: training, inference and the prediction of one image, beside PyTorch in the same rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings, case, key, title


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table per mode: images/s of each side, and their ratio to each twin."""
    rows: dict[str, list[list[str]]] = {mode: [] for mode in settings.modes}
    for of in cases(settings):
        sides = [side for side in workers.sides if takes_part(side, of)]
        name = key(of, *(side.name for side in sides))
        if measured := results.measure("step", name, harness.rounds_of, workers, sides, of, settings.rounds):
            rows[of["mode"]] += lines(of, measured)
    notes = [f"{harness.MARK} more than {harness.MUCH_SYSTEM:.0%} of the CPU time was system time."]
    columns = ("", "type", "batch", "side", "images/s", "s/step", "times the first side", "times PyTorch")
    titles = {"train": "Training", "infer": "Inference", "predict": "One encoded image to its labels"}
    return [harness.table(titles[mode], columns, cells, notes) for mode, cells in rows.items()]


def cases(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the cases of the settings; single images are predicted once per model, resolution and type."""
    for model in settings.models:
        for resolution in settings.resolutions:
            for dtype in settings.dtypes:
                for mode in settings.modes:
                    for batch in (1,) if mode == "predict" else settings.batches:
                        yield case(model, mode, batch=batch, resolution=resolution, dtype=dtype)


def takes_part(side: harness.Side, of: dict[str, Any]) -> bool:
    """Return whether a side has a program for a case: PyTorch has no VPT, no LoRA and no ViT except DINOv2."""
    if side.ours:
        return True
    method, backbone = of["method"], of["backbone"]
    return method in ("q2l", "dr-moe") or (method == "ml-vpt" and backbone.startswith("dinov2"))


def lines(of: dict[str, Any], measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return one row per side; ratios are from paired rounds."""
    rows = []
    names = list(measured)
    working = [name for name in names if "error" not in measured[name]]
    twin = next((name for name in working if name == "PyTorch"), None)
    for name in names:
        row = [title(of), of["dtype"], str(of["batch"]), name]
        result = measured[name]
        if "error" in result:
            rows.append([*row, result["error"]])
            continue
        spread = harness.seconds(result)
        first = harness.ratio(result, measured[working[0]]).text() if name != working[0] else ""
        against = harness.ratio(result, measured[twin]).text() if twin and name != twin else ""
        rate = harness.number(of["batch"] / spread.median)
        rows.append([*row, rate + harness.mark(result), spread.text(), first, against])
    return rows
