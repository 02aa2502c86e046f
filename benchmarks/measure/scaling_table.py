"""Memory, FLOPs and collectives of training steps on TPU slices, compiled without a TPU, and predicted scaling.

    python -m benchmarks.measure scaling_table                      # compile missing rows, write the table
    python -m benchmarks.measure scaling_table --only="B/14 at 224 v5e" --minutes=30
    python -m benchmarks.measure scaling_table --also=v5e:16x16     # larger slices too, to check the program of a chip
    python -m benchmarks.measure scaling_table --again --only=DR-MoE  # the model has changed since
    python -m benchmarks.measure scaling_table --minutes=0          # only rewrite the table

The table is written to docs/scaling.md, which also explains the prediction. Compiling needs libtpu (`pip install
"jax[tpu]"`). Raw results are lines of benchmarks/scaling_table.jsonl, one per row and slice. Stored results are not
compiled again, so the same command resumes after an interruption. --efficiency is the assumed share of the peak FLOP/s.
To add a row, add an entry to ROWS.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from benchmarks.chips import CHIPS
from benchmarks.peers.protocol import versions
from benchmarks.report import ROOT, progress, write_between
from mlmoe_jax.apps.tools.preflight.compile_check import GIB, Programs, capacity_elsewhere, examine, tpu_devices
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.table import Table

RESULTS, PAGE = ROOT / "benchmarks" / "scaling_table.jsonl", ROOT / "docs" / "scaling.md"
MARKS = "<!-- table: benchmarks/measure/scaling_table.py -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Row:
    """A training with a fixed number of images per device; `labels` is by default the number in the data set."""

    name: str
    config: str
    images: int
    labels: int = 0
    overrides: tuple[tuple[str, str], ...] = ()


HOP = 1e-6  # seconds, jax-ml.github.io/scaling-book/sharding
TOPOLOGIES = (
    ("v5e:2x2", "v5e:4x4", "v5e:8x8", "v5e:16x16"),
    ("v6e:2x2", "v6e:4x4", "v6e:8x8", "v6e:16x16"),
    ("v5p:2x2x1", "v5p:2x2x4", "v5p:4x4x4", "v5p:4x8x8"),
)
# Matmuls and frozen weights are in bfloat16, as is usual on TPUs.
SETTINGS = (("model.dtype", "bfloat16"), ("model.frozen_dtype", "bfloat16"))


def _ml_vpt(size: str, letter: str, resolution: int, images: int) -> Row:
    reference = f"mlvpt_dinov2:dataset=coco2014,backbone=dinov2_vit{letter}14,resolution={resolution}"
    return Row(f"ML-VPT, DINOv2-{size} at {resolution}", reference, images)


ROWS = (
    _ml_vpt("B/14", "b", 224, 64),
    _ml_vpt("L/14", "l", 224, 32),
    _ml_vpt("g/14", "g", 224, 16),
    Row("LoRA, DINOv2-B/14 at 224", "lora:dataset=coco2014,backbone=dinov2_vitb14,resolution=224", 64),
    Row("MLMoE, DINOv2-B/14 at 224", "mlmoe_dinov2:dataset=coco2014,backbone=dinov2_vitb14,resolution=224", 64),
    Row("DR-MoE, ResNet-101 at 448", "drmoe_resnet101:dataset=coco2014,resolution=448", 16),
    _ml_vpt("B/14", "b", 448, 16),
    _ml_vpt("L/14", "l", 448, 8),
    _ml_vpt("g/14", "g", 448, 4),
)


# ------------------------------------------------------------------------------------------------------- measuring
def compile_row(row: Row, topology: str) -> dict:
    """Compile the training step of a row for a topology; return the raw result, one line of the file."""
    config = configuration.load_config(row.config, [*SETTINGS, *row.overrides])
    devices = tpu_devices(topology)
    capacity, _ = capacity_elsewhere(devices[0])
    programs, report = compile_step(config, devices, row.images * len(devices), row.labels, capacity)
    return {
        "row": row.name,
        "topology": topology,
        **row_settings(row),
        "labels": programs.num_labels,
        "devices": len(devices),
        "capacity": capacity,
        "packages": versions("jax", "flax", "libtpu"),
        **report,
    }


def compile_step(
    config: ConfigDict, devices: Sequence, batch: int, labels: int, capacity: int | None
) -> tuple[Programs, dict]:
    """Compile a training step for devices; return the programs and their requirements."""
    configuration.validate(config)
    programs = Programs(config, setup_jax(config, devices, training=False), labels)
    return programs, examine(programs.training(batch), len(devices), capacity, quick=True)


def read_results() -> dict[tuple[str, str], dict]:
    """Return (row, topology) -> stored raw result, without results of rows that have changed since."""
    current = {row.name: row_settings(row) for row in ROWS}
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = [json.loads(line) for line in lines]
    return {
        (result["row"], result["topology"]): result
        for result in results
        if (now := current.get(result["row"])) and now == {key: result.get(key) for key in now}
    }


def row_settings(row: Row) -> dict:
    """Return the settings of a row as stored with its raw results."""
    settings = [list(pair) for pair in (*SETTINGS, *row.overrides)]
    sizes = {"images": row.images, "asked_labels": row.labels}
    return {"config": row.config, **sizes, "settings": settings, "quick": True}


# ------------------------------------------------------------------------------------------------------ prediction
def predict(result: dict, topology: str, efficiency: float) -> dict[str, float]:
    """Predict images/s and weak scaling of a step on a slice from a compilation for a slice of the same kind of chip.

    compute = max(FLOPs / (efficiency · peak), bytes accessed / memory bandwidth); communication = bytes sent
    by ring algorithms / one link in one direction + a latency per hop, there and back along every axis of the slice.
    All rows use pure data parallelism, so slices differ only in the number of chips in a collective: over n chips, a
    ring sends (n − 1)/n of the bytes that it sends over many.
    """
    kind, sides = split(topology)
    chip, devices = CHIPS[kind], math.prod(sides)
    compute = max(result["flops"] / (efficiency * chip.flops), result["bytes_accessed"] / chip.memory)
    wire_bytes = sum(kind["wire_bytes"] for kind in result["collectives"].values())
    wire_bytes *= (1 - 1 / devices) / (1 - 1 / result["devices"])
    communication = wire_bytes / chip.link + 2 * sum(side - 1 for side in sides) * HOP if wire_bytes else 0.0
    return {
        "images_per_second": result["images"] * devices / (compute + communication),
        "efficiency": compute / (compute + communication),
    }


def split(topology: str) -> tuple[str, list[int]]:
    """Return the kind of chip and the sides of a slice: "v5e:4x4" -> ("v5e", [4, 4])."""
    kind, _, shape = topology.partition(":")
    return kind, [int(side) for side in shape.split("x")]


def table(results: dict[tuple[str, str], dict], efficiency: float) -> str:
    """Return the table as Markdown, followed by the larger slices that were compiled."""
    kinds, chips = [split(family[0])[0] for family in TOPOLOGIES], math.prod(split(TOPOLOGIES[0][-1])[1])
    compilers = {", ".join(f"{name} {of}" for name, of in result["packages"].items()) for result in results.values()}
    names = ["training", "images per chip", "HBM, GiB", f"images/s, {chips} chips", "weak scaling, %"]
    rows, changes = [], []
    for row in ROWS:
        columns = [_numbers(results.get((row.name, family[0])), family, efficiency) for family in TOPOLOGIES]
        rows.append([row.name, row.images, *map("/".join, zip(*columns, strict=True))])
        for smallest, *others in TOPOLOGIES:
            compiled = [results[key] for slice_ in others if (key := (row.name, slice_)) in results]
            changes += [_change(result, results[row.name, smallest]) for result in compiled]
    text = f"Cells: {'/'.join(kinds)}. Compiled with {' and '.join(sorted(compilers))}."
    if changes:
        text += f" On {len(changes)} larger slices, no need of a chip changes by more than {max(changes):.2f} %."
    return f"{text}\n\n{Table(names, rows).markdown().rstrip()}"


def _numbers(result: dict | None, family: Sequence[str], efficiency: float) -> list[str]:
    """Return the cells of a training: requirements on the smallest slice of a chip, prediction on the largest."""
    if result is None:
        return 3 * ["–"]
    hbm = f"{result['needed'] / GIB:.2f}"
    if not result["fits"]:
        return [f"{hbm} (does not fit)", "–", "–"]
    prediction = predict(result, family[-1], efficiency)
    return [hbm, f"{prediction['images_per_second']:,.0f}", f"{100 * prediction['efficiency']:.2f}"]


def _change(larger: dict, smallest: dict) -> float:
    """Return the largest change of HBM, FLOPs, bytes accessed and bytes in collectives, in percent, or infinity."""
    if not (larger["fits"] and smallest["fits"]):
        return math.inf
    ratios = [larger[key] / smallest[key] for key in ("needed", "flops", "bytes_accessed")]
    ratios.append(_moved(larger) / _moved(smallest))
    return 100 * max(abs(ratio - 1) for ratio in ratios)


def _moved(result: dict) -> int:
    """Return the bytes in collectives per chip and step."""
    return sum(kind["bytes"] for kind in result["collectives"].values())


@dataclass(frozen=True)
class Options:
    only: str = ""
    also: tuple[str, ...] = ()
    again: bool = False
    minutes: float = math.inf
    efficiency: float = 0.5


def measure(options: Options) -> Iterator[str]:
    results, started = read_results(), time.monotonic()
    for topology in [*(family[0] for family in TOPOLOGIES), *options.also]:
        for row in ROWS:
            matches = re.search(options.only, f"{row.name} {topology}")
            if not matches or ((row.name, topology) in results and not options.again):
                continue
            if time.monotonic() - started >= 60 * options.minutes:
                continue
            progress(f"compiling {row.name} for {topology}")
            result = results[row.name, topology] = compile_row(row, topology)
            with RESULTS.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            progress(f"  {result.get('compile_seconds', math.nan):.0f} s, needs {result['needed'] / GIB:.2f} GiB")
    write_between(PAGE, MARKS, table(results, options.efficiency))
    yield f"{len(results)} results; {PAGE} is written"
