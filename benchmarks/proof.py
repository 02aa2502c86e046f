"""The parts of `benchmarks.prove`: what each runs, and how its output becomes a verdict."""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.run import OUT_OF_TIME
from benchmarks.suites import agreement
from mlmoe_jax.models.backbones import catalog

MAIN = (sys.executable, "-m", "mlmoe_jax.main")
FACTS = (
    "import json; from benchmarks.harness import Worker, our_side; print(json.dumps(Worker(our_side('ours')).facts))"
)
SUITE_SHARE = 0.75  # of its time, after which a suite begins no row
# Points of mAP. A further run on digits is within 1.0 of the README's mean of three with a probability of 95 %; tables
# of papers have that bound too. A checkpoint has no randomness, and its published number is rounded.
BOUNDS = {"digits": 1.0, "table": 1.0, "checkpoint": 0.1}
TWINS, PYTORCH = ("step", "data"), "PyTorch"  # the suites with a twin, and the beginning of the twins' names
MLVPT = "--models=ml-vpt@dinov2_vitb14"


@dataclass
class Outcome:
    """The result of a part: `verdict` is passed, measured, failed or out of time; a sentence, tables, numbers."""

    verdict: str
    result: str
    tables: str = ""
    rows: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Setup:
    """What the parts depend on: the folder of the results, the sizes, data sets, and the facts of the devices.

    `peer` is an interpreter with torch, beside which the suites in TWINS are measured.
    """

    out: Path
    short: bool = False
    peer: str = ""
    voc2007: Path | None = None
    coco: Path | None = None
    checkpoint: Path | None = None
    photos: Path | None = None
    names: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> Path:
        """The folder with the output and the log of each part."""
        return self.out / "parts"


@dataclass(frozen=True)
class Part:
    """A part of the proof.

    Attributes:
      about: what it shows.
      minutes: its share of the budget; of `own_time` parts, which are outside the budget, its limit.
      short_minutes: its share of the budget with --short.
      command: (setup, seconds) -> the words of its command, whose exit code must be 0 or OUT_OF_TIME.
      read: (setup, standard output, exit code) -> its outcome.
    """

    name: str
    about: str
    minutes: float
    command: Callable[[Setup, float], list[str]]
    read: Callable[[Setup, str, int], Outcome]
    own_time: bool = False
    short_minutes: float = 1.0

    def share(self, setup: Setup) -> float:
        """Return its share of the budget in minutes."""
        return self.short_minutes if setup.short else self.minutes


def parts_of(setup: Setup, names: list[str]) -> list[Part]:
    """Return the named parts, and those for which there is data."""
    tables = TABLE_2 if setup.voc2007 else ()
    checkpoint, by_name = (CHECKPOINT if setup.coco else ()), (BY_NAME if setup.names else ())
    return [part for part in PARTS if part.name in names] + [*tables, *checkpoint, *by_name]


def _read_devices(setup: Setup, output: str, code: int) -> Outcome:
    facts = json.loads(output)
    return Outcome("measured", harness.describe_process(facts), rows=facts)


# ------------------------------------------------------------------------------------------------------------ suites
def suite(
    name: str, minutes: float, short_minutes: float, judge: Callable[[dict[str, Any]], tuple[str, str]], sizes: str
) -> Part:
    """Return the part that runs a suite of `benchmarks.run`.

    Args:
      judge: rows by key -> verdict and result.
      sizes: flags for an accelerator, in which 64N is 64 per device.
    """

    def file(setup: Setup) -> Path:
        return setup.parts / f"{name}.json"

    def command(setup: Setup, seconds: float) -> list[str]:
        devices = len(setup.facts["devices"])
        flags = "--quick" if setup.short else re.sub(r"(\d+)N", lambda match: str(int(match[1]) * devices), sizes)
        words = [f"--suite={name}", f"--json={file(setup)}", f"--log={setup.parts / name}.worker.log", *flags.split()]
        if setup.peer and name in TWINS:
            words.append(f"--peer={setup.peer}")
        return [sys.executable, "-m", "benchmarks.run", f"--minutes={SUITE_SHARE * seconds / 60}", *words]

    def read(setup: Setup, output: str, code: int) -> Outcome:
        rows = json.loads(file(setup).read_text())["rows"] if file(setup).exists() else {}
        tables = output[output.find("**") :] if "**" in output else ""
        if reason := next(_errors(rows), ""):
            return Outcome("failed", reason, tables, rows)
        if code == OUT_OF_TIME:
            return Outcome("out of time", "some rows were not measured", tables, rows)
        return Outcome(*judge(rows), tables, rows)

    about = importlib.import_module(f"benchmarks.suites.{name}").__doc__.partition(": ")[2]
    return Part(name, about[0].upper() + about[1:], minutes, command, read, short_minutes=short_minutes)


def _errors(value: Any) -> Iterator[str]:
    """Yield the reasons of all cases that failed, except for the rows of PyTorch, which the tables show."""
    if isinstance(value, dict):
        yield from [str(value["error"])] if "error" in value else []
        for name, inner in value.items():
            if not name.startswith(PYTORCH):
                yield from _errors(inner)


def _size(key: str, name: str) -> str:
    """Return a size of a case from its key."""
    return re.search(rf"\b{name}=(\S+)", key)[1]


def _judge_agreement(rows: dict[str, Any]) -> tuple[str, str]:
    outcomes = rows.values()
    wrong = [f"{one['dtype']}, precision {one['precision']}" for one in outcomes if not agreement.agrees(one)]
    largest = [max(one["gradients"] for one in outcomes if one["dtype"] == dtype) for dtype in ("float32", "bfloat16")]
    text = "gradients differ by at most {:.1e} (float32) and {:.1e} (bfloat16)".format(*largest)
    return ("failed", f"beyond the limits in {'; '.join(dict.fromkeys(wrong))}") if wrong else ("passed", text)


def _judge_mfu(rows: dict[str, Any]) -> tuple[str, str]:
    known = [f"{row['mfu']:.0%} at {_size(key, 'resolution')} px" for key, row in rows.items() if row["mfu"]]
    return "measured", ", ".join(known) or "no MFU, because the peak FLOP/s of this device are not known"


def _judge_attention(rows: dict[str, Any]) -> tuple[str, str]:
    texts = []
    for key, ways in rows.items():
        ours, other = ("cuDNN", "matmuls") if ways["chosen"]["cudnn"] else ("matmuls", "library")
        times = harness.ratio(ways["chosen"], ways[other]).median
        than = {"matmuls": "matmuls", "library": "jax.nn"}[other]
        texts.append(f"{ours} {times:.2f} times as fast as {than} at {_size(key, 'resolution')} px")
    return "measured", ", ".join(texts)


def _judge_step(rows: dict[str, Any]) -> tuple[str, str]:
    trained = {key: sides for key, sides in rows.items() if _size(key, "mode") == "train"}
    return "measured", f"training, images/s: {', '.join(_rates(key, sides) for key, sides in trained.items())}"


def _rates(key: str, sides: dict[str, Any]) -> str:
    """Return a method, its size, its images/s, and how many times as fast as PyTorch it is."""
    rate = harness.number(int(_size(key, "batch")) / harness.seconds(sides["ours"]).median)
    twins = [
        f"{harness.ratio(sides['ours'], one).median:.2f} times {name}"
        for name, one in sides.items()
        if name.startswith(PYTORCH) and "error" not in one
    ]
    name = f"{_size(key, 'method')} at {_size(key, 'resolution')} px {rate}"
    return f"{name} ({', '.join(twins)})" if twins else name


def _judge_loop(rows: dict[str, Any]) -> tuple[str, str]:
    [row] = rows.values()
    rates = harness.Spread.of(row["bare"]["batch"] / one["seconds"] for one in row["bare"]["rounds"])
    return "measured", f"{row['loop']['images_per_second'] / rates.median:.2f} of the speed of the bare step"


def _judge_overhead(rows: dict[str, Any]) -> tuple[str, str]:
    texts = [f"{key.partition(': ')[2]} {1e3 * row['seconds']:.2f}" for key, row in rows.items()]
    return "measured", f"ms of the host per step: {', '.join(texts[:2])}"


def _judge_data(rows: dict[str, Any]) -> tuple[str, str]:
    [row] = rows.values()
    speeds = [row["speeds"][f"ours: with cutout and RandAugment{more}"] for more in ("", ", all cores")]
    one, every = (harness.number(harness.Spread.of(values).median) for values in speeds)
    return "measured", f"augmented images/s: {one} with one thread, {every} with all cores"


def _judge_memory(rows: dict[str, Any]) -> tuple[str, str]:
    [row] = [row for key, row in rows.items() if "largest" in key]
    if "device_peak" not in row:
        return "measured", "the largest batch runs on an accelerator only"
    return "passed", f"{row['batch']:,} images fit one device by the compiler's account, and their step ran"


# ------------------------------------------------------------------------------------------------------------ digits
def known_digits() -> tuple[int, float, float]:
    """Return the epochs, the learning rate and the mean test mAP, in percent, of ML-VPT on digits in the README."""
    results = json.loads((harness.ROOT / "benchmarks" / "digits_methods.json").read_text())
    method = results["methods"]["mlvpt_digits"]
    return results["epochs"], method["rate"], 100 * statistics.mean(method["test"])


def _digits_command(setup: Setup, seconds: float) -> list[str]:
    epochs, rate, _ = known_digits()
    keys = {"train.epochs": 1 if setup.short else epochs, "optim.learning_rate": rate}
    flags = (f"--config.{key}={value}" for key, value in keys.items())
    return [*MAIN, "--config=mlvpt_digits", f"--workdir={setup.out / 'digits'}", *flags]


def _read_digits(setup: Setup, output: str, code: int) -> Outcome:
    splits = json.loads((setup.out / "digits" / "results.json").read_text())
    rows = {name: 100 * entry["metrics"]["mAP"] for name, entry in splits.items()}
    table = harness.table("mAP in percent", tuple(rows), [[f"{value:.2f}" for value in rows.values()]])
    if setup.short:
        return Outcome("measured", f"test mAP {rows['test']:.2f} after one epoch, which has no bound", table, rows)
    return compared(rows["test"], known_digits()[-1], "digits", "in the README", rows, table)


def compared(
    ours: float, known: float, kind: str, where: str, rows: dict[str, Any], tables: str = "", more: str = ""
) -> Outcome:
    """Return the outcome of a comparison of mAP in percent, with the bound of a kind."""
    text = f"mAP {ours:.2f}{more}, {where} {known}; the bound is {BOUNDS[kind]} points"
    return Outcome("passed" if abs(ours - known) <= BOUNDS[kind] else "failed", text, tables, rows)


# ------------------------------------------------------------------------------------------------------------ papers
def _table_command(method: str, setup: Setup, seconds: float) -> list[str]:
    words = ["--mode=reproduce", "--table=mlvpt.2", f"--only=DINOv2-S,224,{method}", "--seeds=0,1,2", "--json"]
    return [*MAIN, *words, f"--root={setup.voc2007}", f"--workdir={setup.out / 'reproduce'}"]


def _read_table(setup: Setup, output: str, code: int) -> Outcome:
    [row] = [row for row in json.loads(output) if row["column"] == "mAP"]
    spread = f" ± {row['standard_deviation']:.2f} over {row['seeds']} seeds"
    return compared(row["ours"], row["published"], "table", "published", row, more=spread)


def _import_command(setup: Setup, seconds: float) -> list[str]:
    config = f"--config=mlvpt_dinov2:dataset=coco2014,root={setup.coco},precision=authors"
    return [*MAIN, "--mode=import", config, f"--config.init_from={setup.checkpoint}", f"--workdir={setup.out / 'coco'}"]


def _eval_command(setup: Setup, seconds: float) -> list[str]:
    return [*MAIN, "--mode=eval", f"--workdir={setup.out / 'coco'}", "--json"]


def _read_eval(setup: Setup, output: str, code: int) -> Outcome:
    [metrics] = json.loads(output).values()
    return compared(100 * metrics["mlvpt/mAP"], 87.5, "checkpoint", "published", metrics)


# --------------------------------------------------------------------------------------------------- labels by name
# Backbone -> published zero-shot mAP on the test split of VOC 2007, in percent; None if none is known. CLIP: rows
# voc2007_multilabel of LAION-AI/CLIP_benchmark, benchmark/benchmark.csv, whose prompts and crops differ from ours.
ZERO_SHOT = {"clip_vitb16": 78.88, "siglip2_vitb16_256": None, "tipsv2_vitb14": None}


def _by_name_command(backbone: str, setup: Setup, seconds: float) -> list[str]:
    config = f"linear_probe:dataset=voc2007,root={setup.photos},backbone={backbone}"
    keys = {
        "data.image_size": catalog.entry(backbone).image_size,
        "model.head.kind": "cosine",
        "model.head.names": setup.names,
    }
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    return [*MAIN, "--mode=import", f"--config={config}", f"--workdir={setup.out / backbone}", *flags]


def _score_command(backbone: str, setup: Setup, seconds: float) -> list[str]:
    return [*MAIN, "--mode=eval", f"--workdir={setup.out / backbone}", "--json"]


def _read_by_name(backbone: str, setup: Setup, output: str, code: int) -> Outcome:
    [metrics] = json.loads(output).values()
    known = ZERO_SHOT[backbone]
    beside = f"published {known}" if known else "no published number is known"
    return Outcome("measured", f"mAP {100 * metrics['mAP']:.2f} by the names alone; {beside}", rows=metrics)


# ------------------------------------------------------------------------------------------------------------- parts
_DIGITS = "ML-VPT on digits as in the table of the README, trained and evaluated."
_HALF = "--dtypes=bfloat16"
# The most important first, because the last parts are the first without time.
PARTS = (
    Part("devices", "What JAX sees.", 2, lambda setup, seconds: [sys.executable, "-c", FACTS], _read_devices),
    suite("agreement", 5, 2, _judge_agreement, f"{MLVPT} --resolutions=224 --batches=4"),
    suite("step", 8, 0.7, _judge_step, f"{MLVPT},dr-moe --resolutions=224,448 --batches=32N {_HALF}"),
    suite("mfu", 5, 0.5, _judge_mfu, f"{MLVPT} --resolutions=224,448 {_HALF}"),
    suite("memory", 6, 1, _judge_memory, f"{MLVPT} --resolutions=224 --batches=64 {_HALF} --modes=train"),
    suite("attention", 3, 0.4, _judge_attention, f"{MLVPT} --resolutions=224,448 {_HALF}"),
    suite("data", 3, 0.4, _judge_data, "--resolutions=224 --rounds=3"),
    Part("digits", _DIGITS, 4, _digits_command, _read_digits, short_minutes=2),
    suite("loop", 2, 1, _judge_loop, "--rounds=6"),
    suite("overhead", 2, 1, _judge_overhead, ""),
)
TABLE_2 = tuple(
    Part(
        f"voc2007 {method}",
        f"ML-VPT, table 2: {method} on VOC 2007 with DINOv2-S at 224 px, three seeds.",
        90,
        partial(_table_command, method),
        _read_table,
        own_time=True,
    )
    for method in ("VPT", "E2VPT", "ML-VPT")
)
_IMPORTED = Outcome("measured", "imported")
CHECKPOINT = (
    Part("import", "Reading the authors' checkpoint.", 10, _import_command, lambda *_: _IMPORTED, own_time=True),
    Part("coco2014", "ML-VPT, table 4: the checkpoint on val2014.", 30, _eval_command, _read_eval, own_time=True),
)
BY_NAME = tuple(
    part
    for backbone in ZERO_SHOT
    for part in (
        Part(
            f"names {backbone}",
            "Encoding the names of the labels.",
            10,
            partial(_by_name_command, backbone),
            lambda *_: _IMPORTED,
            own_time=True,
        ),
        Part(
            f"voc2007 by name {backbone}",
            "Zero-shot mAP on the test split of VOC 2007, see docs/labels-by-name.md.",
            30,
            partial(_score_command, backbone),
            partial(_read_by_name, backbone),
            own_time=True,
        ),
    )
)
