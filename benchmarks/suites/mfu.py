"""mfu: the share of the device's peak FLOP/s that a training step reaches in its model's multiply-adds."""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.chips import chip_of
from benchmarks.suites.cases import Settings, case, images_per_device, key, title


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table with one row per model, resolution and type."""
    side, rows = workers.sides[0], []
    devices = workers.of(side).facts["devices"]
    for model in settings.models:
        for resolution in settings.resolutions:
            for dtype in settings.dtypes:
                batch = images_per_device(settings, resolution) * len(devices)
                of = case(model, "train", batch=batch, resolution=resolution, dtype=dtype)
                if outcome := results.measure("mfu", key(of, side.name), _measured, settings, workers, of):
                    rows.append([title(of), dtype, f"{batch:,}", *harness.cells_of(outcome, _cells, of["batch"])])
    columns = ("training", "type", "batch", "images/s", "GMACs per image", "TFLOP/s per device", "MFU")
    notes = ["MACs: of the forward and the backward pass, without attention scores that are computed twice."]
    if chip_of(devices[0]) is None:
        notes.append(f"The peak of {devices[0]} is not in benchmarks/chips.py, so there is no MFU.")
    return [harness.table("Model FLOP/s utilization", columns, rows, notes)]


def utilization(of: dict[str, Any], outcome: dict[str, Any], devices: list[str]) -> tuple[float, float | None]:
    """Return FLOP/s per device and their share of the peak in bfloat16; None if the peak is not known."""
    speed = 2 * outcome["macs"] * of["batch"] / harness.seconds(outcome).median / len(devices)
    chip = chip_of(devices[0])
    return speed, speed / chip.flops if chip and of["dtype"] == "bfloat16" else None


def _measured(settings: Settings, workers: harness.Workers, of: dict[str, Any]) -> dict[str, Any]:
    side = workers.sides[0]
    outcome = harness.rounds_of(workers, [side], of, settings.rounds)[side.name]
    if "error" in outcome:
        return outcome
    macs = workers.of(side).call("step_macs", case=of)
    speed, share = utilization(of, outcome | macs, workers.of(side).facts["devices"])
    return outcome | macs | {"batch": of["batch"], "flops_per_device": speed, "mfu": share}


def _cells(outcome: dict[str, Any], batch: int) -> list[str]:
    share = outcome["mfu"]
    rate = harness.number(batch / harness.seconds(outcome).median) + harness.mark(outcome)
    speed = harness.number(outcome["flops_per_device"] / 1e12)
    return [rate, harness.number(outcome["macs"] / 1e9), speed, "" if share is None else f"{share:.0%}"]
