"""Compare methods on digits-v1: mAP over seeds, drop without correlations, and differences of pairs of methods.

    python -m benchmarks.measure digits_methods

All methods have one number of --epochs and equal tuning: the learning rate is the best of --rates on `val`, for the
first of --seeds. Then each method is trained with all of them. `test` and `test_shift` are only scored.

Methods that have results in benchmarks/digits_methods.json, with the same epochs, rates and seeds, are not trained
again; remove their entries to train them again.

Each training has its own run folder below --out. A learning rate with which a training diverges is not chosen.

The results are benchmarks/digits_methods.json and the tables between the marks in docs/results.md and README.md.
`python -m tools.docs.draw_digits` draws the chart from the tables.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from benchmarks.measure import trainings
from benchmarks.measure.options import SEEDS
from benchmarks.report import CONFIDENCE, ROOT, over_seeds, t_interval, write_between
from mlmoe_jax.apps.papers.grid import point_name
from mlmoe_jax.apps.tools.preflight.cost import count_cost
from mlmoe_jax.config import load_config
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.table import Table

# Configs with their arguments but `dataset=digits`, and with further keys.
METHODS = (
    "linear_probe",
    "finetune",
    "vpt:variant=shallow",
    "vpt",
    "gatevpt",
    "e2vpt",
    *("lora", "dora", "bitfit", "ssf", "adaptformer"),
    "gvpt:sides=co",
    "gvpt:sides=dc",
    "gvpt",
    "gvpt:per_group=12",  # about as many trainable parameters as mlvpt_digits
    "mlvpt_digits --config.model.head.gates_of=group",
    "mlvpt_digits",
    "csra_resnet101",
    "splicemix_resnet101:consistency=false",
    "splicemix_resnet101",
    "pat_resnet101",
    "cnn_rnn_resnet101",
    "mlgcn_resnet101",
    "addgcn_resnet101",
    "ml_decoder_resnet101",
    "q2l_resnet101",
    "hsq_resnet101",
    "drmoe_resnet101:preset=static",
    "drmoe_resnet101",
    "mlmoe_dinov2:prompts=false",
    "mlmoe_dinov2:gates=static",
    "mlmoe_dinov2",
)
# The features of the backbone do not change in training and are computed once.
_CACHED = re.compile("^linear_probe|(?<!^splicemix)_resnet101|prompts=false")
PAIRS = (
    ("vpt", "gvpt"),
    ("gvpt", "mlvpt_digits"),
    ("mlvpt_digits --config.model.head.gates_of=group", "mlvpt_digits"),
    ("pat_resnet101", "mlvpt_digits"),
    ("pat_resnet101", "mlmoe_dinov2"),
)
IN_README = {
    "linear_probe": "linear probe, `linear_probe`",
    "finetune": "fine-tuning, `finetune`",
    "vpt": "VPT, `vpt`",
    "dora": "DoRA, `dora`",
    "mlvpt_digits": "ML-VPT, `mlvpt_digits`",
    "q2l_resnet101": "Q2L, `q2l_resnet101`",
    "drmoe_resnet101": "DR-MoE, `drmoe_resnet101`",
    "mlmoe_dinov2": "MLMoE, `mlmoe_dinov2`",
}
SPLITS, LABELS = ("val", "test", "test_shift"), 10
RESULTS, PAGE, README = ROOT / "benchmarks" / "digits_methods.json", ROOT / "docs" / "results.md", ROOT / "README.md"
MARKS = "<!-- tables: benchmarks/measure/digits_methods.py -->", "<!-- end of tables -->"


@dataclass(frozen=True)
class Options:
    epochs: int = 2
    rates: tuple[float, ...] = (1e-3, 5e-3, 2e-2, 1e-1)
    seeds: tuple[int, ...] = SEEDS
    out: Path = Path("runs/digits_methods")


# ---------------------------------------------------------------------------------------------------------------- runs
def reference_of(method: str) -> tuple[str, dict[str, str]]:
    """Return the config with its arguments, and the keys, of an entry of METHODS."""
    reference, *flags = method.split(" --config.")
    if reference != "mlvpt_digits":
        name, _, arguments = reference.partition(":")
        reference = f"{name}:dataset=digits,{arguments}".rstrip(",")
    return reference, dict(flag.split("=", 1) for flag in flags)


def method_config(method: str, epochs: int) -> ConfigDict:
    """Return the config of an entry of METHODS, without samples and event files."""
    reference, keys = reference_of(method)
    config = load_config(reference, [*keys.items()])
    config.train.epochs, config.log.tensorboard, config.report.samples = epochs, False, 0
    return config


def training(method: str, rate: float, seed: int, options: Options) -> tuple[ConfigDict, Path]:
    """Return the config and the run folder of one training of a method."""
    config = method_config(method, options.epochs)
    config.optim.learning_rate, config.seed = rate, seed
    if _CACHED.search(method):
        config.data.cache_features = "float32"
    return config, options.out / point_name({"method": method, "rate": rate, "seed": seed}, config)


def stored_results(options: Options) -> dict[str, dict]:
    """Return the stored results of methods with the same epochs, rates and seeds; {} if they differ."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    asked = {"epochs": options.epochs, "rates": [*options.rates], "seeds": [*options.seeds]}
    if any(stored.get(name) != value for name, value in asked.items()):
        return {}
    return {method: one for method, one in stored["methods"].items() if method in METHODS}


def compare(method: str, options: Options) -> dict:
    """Return the results of a method with the best of the learning rates; train what is missing."""

    def chosen(rate: float, seed: int, tuned: bool) -> tuple[ConfigDict, Path]:
        return training(method, rate, seed, options)

    splits = {"tuned_on": "val", "measured_on": "test"}
    rate, folders, _, common = trainings.compare(options.rates, chosen, options.seeds, np.arange(LABELS), **splits)
    results = [StoredRun(RunFolder(folder)).final_metrics for folder in folders]
    values = {split: [one[split]["mAP"] for one in results] for split in SPLITS}
    return {"rate": rate, "tuning": common["tuning"], **values}


# -------------------------------------------------------------------------------------------------------------- output
def write(results: dict) -> None:
    """Write the tables of the results to docs/results.md and README.md."""
    write_between(PAGE, MARKS, tables(results))
    write_between(README, MARKS, table_of_readme(results))


def tables(results: dict) -> str:
    """Return the sentence on the trainings and the tables of all methods and of the pairs, as Markdown."""
    methods, rates = results["methods"], ", ".join(f"{rate:g}" for rate in results["rates"])
    head = ["config, with `dataset=digits`", "trainable", "MMACs", "test", "test_shift", "drop"]
    rows = []
    for method, one in methods.items():
        cells = map(over_seeds, _columns(one)[1:])
        counts = f"{one['trainable']:,}", f"{one['macs'] / 1e6:.1f}"
        rows.append([f"`{method}`", *counts, *cells])
    pairs = []
    for first, second in PAIRS:
        columns = zip(_columns(methods[first])[1:], _columns(methods[second])[1:], strict=True)
        pairs.append([f"`{second}` − `{first}`", *itertools.starmap(difference, columns)])
    lines = [
        f"All methods: {results['epochs']} epochs and the learning rate with the best mAP on `val` for seed "
        f"{results['seeds'][0]}, of {rates}.",
        f"mAP in percent, mean ± sample standard deviation over {len(results['seeds'])} seeds. MMACs: million "
        "multiply-adds per image, with attention, experts and gates.",
        "",
        Table(head, rows).markdown(),
        f"Differences in percentage points, with {100 * CONFIDENCE:g} % t-intervals over the seeds, paired:",
        "",
        Table(["difference", "test", "test_shift", "drop"], pairs).markdown().rstrip(),
    ]
    return "\n".join(lines)


def table_of_readme(results: dict) -> str:
    """Return the table of the methods in IN_README, as Markdown."""
    seeds = len(results["seeds"])
    setting = f"method, config; {results['epochs']} epochs, mAP in %, mean ± sample deviation over {seeds} seeds"
    head = [setting, "trainable parameters", "`val`", "`test`", "`test_shift`", "drop"]
    rows = []
    for method, text in IN_README.items():
        one = results["methods"][method]
        rows.append([text, f"{one['trainable']:,}", *map(over_seeds, _columns(one))])
    return Table(head, rows).markdown().rstrip()


def _columns(result: dict) -> list[np.ndarray]:
    """Return mAP per seed on SPLITS, and the drop from `test` to `test_shift`."""
    columns = [np.array(result[split]) for split in SPLITS]
    return [*columns, columns[-2] - columns[-1]]


def difference(first: np.ndarray, second: np.ndarray) -> str:
    """Return the mean of second − first in percent and, for several seeds, its t-interval, paired by seed."""
    values = 100 * (second - first)
    if len(values) == 1:
        return f"{values[0]:+.2f}".replace("-", "−")
    mean, half = t_interval(values)
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]".replace("-", "−")


def measure(options: Options) -> Iterator[str]:
    stored = stored_results(options)
    methods = {method: stored.get(method) or compare(method, options) for method in METHODS}
    for method, one in methods.items():
        cost = count_cost(method_config(method, options.epochs))
        one |= {"trainable": cost["params"]["trainable"], "macs": cost["macs"]["full"]}
    results = {"epochs": options.epochs, "rates": options.rates, "seeds": options.seeds, "methods": methods}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write(results)
    yield tables(results)
