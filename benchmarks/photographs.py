"""Compare heads on photographs, on an EfficientNet-Lite0 that is frozen or fine-tuned.

    python -m benchmarks.photographs --root=/data/VOCdevkit --part=frozen --out=runs/photographs

--root is a data set in the layout of VOC 2012 with the splits `train` and `val`. All methods have one recipe, equal
widths and equal tuning: the learning rate and the number of epochs are chosen from --rates and --epochs on a fifth of
`train`, drawn with the first seed, and then the method is trained on all of `train` once per seed. `val` is only
scored, once per training. Nothing is selected during a training: the last moving average counts.

--linear-path=1e-2 adds a linear classifier of the mean patch to the logits of all heads with a query decoder.

A fine-tuned backbone has its own learning rate, one for all heads. --rates-of=OUT/frozen.json takes the rate of each
head from the frozen part instead of tuning it again. A grid of one value is not tuned.

Each training has its own run folder. Finished trainings are read and an interrupted training resumes, so rerunning
a command continues it. The frozen part trains on cached features (data.cache_features), without
augmentation.

The results are OUT/PART.json and OUT/PART.md: mAP, CF1 and OF1 over the classes with at least ten positives in `val`,
co-occurrence overfitting, and the CPU seconds of a training, all its threads together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.apps.cli.large_pages import use_large_pages
from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.metrics.bootstrap import WeightedMetrics, draw, percentile_interval
from mlmoe_jax.evaluation.results import SplitScores, read_labels, read_scores
from mlmoe_jax.runs.assemble import assemble, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.training.experiment import make_experiment
from mlmoe_jax.training.loop import train
from mlmoe_jax.training.training_data import open_training_data

METHODS = {
    "linear probe": "linear_probe",
    "Q2L": "q2l_resnet101",
    "ML-Decoder": "ml_decoder_resnet101",
    "ML-GCN": "mlgcn_resnet101",
    "ADD-GCN": "addgcn_resnet101",
    "CNN-RNN": "cnn_rnn_resnet101",
    "HSQ": "hsq_resnet101",
    "DR-MoE": "drmoe_resnet101:preset=recommended",
    "DR-MoE, static gates": "drmoe_resnet101:preset=static",
    "MLMoE": "mlmoe_dinov2:prompts=false",
}
BACKBONE = "efficientnet_lite0"
WIDTH = 256  # width of decoders, graphs and the LSTM; experts and gates have a quarter
LEAST_POSITIVES, THRESHOLD, RESAMPLES = 10, 0.5, 1000
HELD_OUT = "held_out"
TIMES = "benchmark.json"
METRICS = ("mAP", f"CF1@{THRESHOLD:g}", f"OF1@{THRESHOLD:g}")
GAPS = ("cooccurrence/fpr_gap", "cooccurrence/auc_gap")


@dataclass(frozen=True)
class Benchmark:
    """The flags of the command line."""

    root: str
    part: str
    out: Path
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: tuple[int, ...]
    rates_of: dict[str, float]
    backbone_rate: float
    linear_path: float = 0
    side: int = 224


# ------------------------------------------------------------------------------------------------------------- configs
def method_config(method: str, benchmark: Benchmark, *, rate: float, epochs: int, seed: int) -> ConfigDict:
    """Return the config of a method with the common recipe, on all of `train`; `rate` is the head's learning rate."""
    name, colon, options = METHODS[method].partition(":")
    arguments = f"dataset=voc2012,root={benchmark.root},backbone={BACKBONE},resolution={benchmark.side}"
    config = load_config(f"{name}:{arguments}{',' if colon else ''}{options}", [])
    use_widths(config.model.head)
    use_recipe(config, epochs)
    config.seed, config.optim.learning_rate = seed, rate
    rules = ()
    if benchmark.linear_path:
        config.model.head.residual, rules = "pooled", ((r"^head/pooled/", benchmark.linear_path / rate),)
    if benchmark.part == "frozen":
        config.optim.rate_rules = rules
        config.trainable = ((r"^backbone/", False), (r"", True))
        config.data.cache_features = "float32"
    else:
        config.trainable = ((r"", True),)
        config.model.backbone.batch_norm = "running"
        config.optim.rate_rules = (*rules, (r"^backbone/", benchmark.backbone_rate / rate))
        config.augment.geometry, config.augment.flip = "random_resized_crop", True
        config.augment.crop_scale = (0.5, 1.0)
    return config


def use_widths(head: ConfigDict) -> None:
    """Give all heads equal widths."""
    decoder = head.decoder
    decoder.width, decoder.heads, decoder.hidden = WIDTH, 8, 2 * WIDTH
    head.routing.expert_hidden = head.routing.gate_hidden = WIDTH // 4
    head.graph.hidden = head.sequence.hidden = WIDTH
    head.graph.vector_width, head.sequence.max_labels = 20, 6


def use_recipe(config: ConfigDict, epochs: int) -> None:
    """Give all methods one recipe: binary cross-entropy, AdamW, one cycle, no selection, no augmentation."""
    fresh = load_config("linear_probe:dataset=digits", [])  # a config without the recipe of any paper
    config.optim, config.augment = fresh.optim, fresh.augment
    config.optim.name, config.optim.schedule, config.optim.weight_decay = "adamw", "one_cycle", 1e-2
    config.loss.kind, config.loss.reduce, config.loss.scale = "bce", "mean", 1.0
    config.ema.decay = 0.98
    config.train.epochs, config.train.batch_size, config.train.patience = epochs, 64, 0
    config.train.log_every, config.log.tensorboard = 30, False
    config.model.backbone.batch_norm, config.model.backbone.normalization = "frozen", "auto"
    config.data.difficult_train = config.data.difficult_eval = "negative"
    config.data.exif, config.data.truncated = "ignore", "read"
    config.data.keep_empty, config.data.val_split, config.data.test_splits = False, "", ("val",)
    config.eval.select_on, config.eval.every_epochs, config.eval.batch_size = "none", epochs, 64
    config.checkpoint.every_epochs, config.checkpoint.keep = max(1, epochs // 4), 1


# ---------------------------------------------------------------------------------------------------------------- runs
def run(config: ConfigDict, folder: Path) -> SplitScores:
    """Return the scores of a training on its last evaluation split; train first if necessary."""
    run_folder = RunFolder(folder)
    if not (folder / TIMES).exists():
        if config.data.cache_features != "no":
            compute_features(config)
        began = time.process_time()
        train(config, run_folder)
        run_folder.write_json(TIMES, {"cpu_seconds": round(time.process_time() - began, 1)})
    return read_scores(run_folder)[config.data.test_splits[-1]]


def compute_features(config: ConfigDict) -> None:
    """Fill the cache of features, so that the time of a training does not depend on the methods before it."""
    mesh, data = setup_jax(config), open_training_data(config)
    parts = assemble(config, data.label_space)
    make_experiment(config, RunFolder("unused"), data, parts, preprocess_for(config), mesh)


def tuned(method: str, benchmark: Benchmark, folder: Path, columns: np.ndarray) -> tuple[float, int, dict]:
    """Return the learning rate and the epochs with the best mAP on the held-out part of `train`, and all these mAPs."""
    rates = (benchmark.rates_of[method],) if benchmark.rates_of else benchmark.rates
    grid, tuning = [*itertools.product(rates, benchmark.epochs)], {}
    for rate, epochs in grid if len(grid) > 1 else ():
        config = method_config(method, benchmark, rate=rate, epochs=epochs, seed=benchmark.seeds[0])
        config.data.val_split, config.data.val_fraction, config.data.test_splits = HELD_OUT, 0.2, (HELD_OUT,)
        scored = run(config, folder / f"tune-rate={rate:g},epochs={epochs}").with_labels(columns)
        tuning[rate, epochs] = float(measure(scored)(np.ones((len(scored), 1), np.float32))[0]["mAP"][0])
    rate, epochs = max(tuning, key=tuning.get, default=grid[0])
    return rate, epochs, {f"rate={rate:g},epochs={epochs}": value for (rate, epochs), value in tuning.items()}


def measure(scored: SplitScores) -> WeightedMetrics:
    """Return the metrics of a split, as functions of the weights of its images."""
    entries = scored.entries("negative")
    return WeightedMetrics(entries.scores, entries.positive, entries.valid, THRESHOLD)


def frequent(root: str) -> np.ndarray:
    """Return the columns of the classes with enough positives in `val`."""
    data = default_config().data
    data.name, data.root = "voc2012", root
    labels = open_split(data, "val").labels
    return np.flatnonzero((labels == 1).sum(axis=0) >= LEAST_POSITIVES)


def compare(method: str, benchmark: Benchmark, columns: np.ndarray) -> dict:
    """Return the results of a method; train what is missing."""
    folder = benchmark.out / benchmark.part / METHODS[method].replace(":", "_")
    rate, epochs, tuning = tuned(method, benchmark, folder, columns)
    scores, gaps, seconds = [], [], []
    for seed in benchmark.seeds:
        config = method_config(method, benchmark, rate=rate, epochs=epochs, seed=seed)
        place = folder / f"rate={rate:g},epochs={epochs},seed={seed}"
        scores.append(run(config, place).with_labels(columns))
        results = json.loads((place / "results.json").read_text())["val"]["metrics"]
        gaps.append([results.get(name, float("nan")) for name in GAPS])
        seconds.append(json.loads((place / TIMES).read_text())["cpu_seconds"])
    whole = np.ones((len(scores[0]), 1), np.float32)
    metrics = [measure(one)(whole)[0] for one in scores]
    return {
        "rate": rate,
        "epochs": epochs,
        "tuning": tuning,
        "classes": [read_labels(RunFolder(place))[column] for column in columns],
        **{name: [float(values[name][0]) for values in metrics] for name in METRICS},
        **{name: [float(gap[k]) for gap in gaps] for k, name in enumerate(GAPS)},
        "AP": np.mean([measure(one)(whole)[1][0] for one in scores], axis=0).tolist(),
        "cpu_seconds": seconds,
        "resampled_mAP": resampled_map(scores).tolist(),
    }


def resampled_map(scores: list[SplitScores]) -> np.ndarray:
    """Return the mAP, averaged over seeds, of resamples of the images that are equal for all methods, f64[R]."""
    measures = [measure(one) for one in scores]
    parts = draw(len(scores[0]), RESAMPLES, 0)
    return np.concatenate([np.mean([one(weights)[0]["mAP"] for one in measures], axis=0) for weights in parts])


# -------------------------------------------------------------------------------------------------------------- output
def table(results: dict[str, dict]) -> str:
    """Return the Markdown table; differences are to the first method, with the interval of the paired bootstrap."""
    first = next(iter(results.values()))
    lines = [
        "| head | rate | epochs | mAP | − linear probe | CF1 | OF1 | FPR gap | AUC gap | CPU s |".replace(
            "linear probe", next(iter(results))
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for method, result in results.items():
        low, high = percentile_interval(np.subtract(result["resampled_mAP"], first["resampled_mAP"]))
        difference = 100 * (np.mean(result["mAP"]) - np.mean(first["mAP"]))
        against = "" if result is first else f"{difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
        cells = [over_seeds(result[name]) for name in (*METRICS, *GAPS)]
        mean_ap, *rest = cells
        seconds = f"{np.mean(result['cpu_seconds']):.0f}"
        chosen = f"| {method} | {result['rate']:g} | {result['epochs']}"
        lines.append(" | ".join([chosen, mean_ap, against, *rest, f"{seconds} |"]))
    return "\n".join(lines) + "\n"


def over_seeds(values: list[float]) -> str:
    """Return the mean of fractions in percent, and for several fractions their sample standard deviation."""
    spread = f" ± {100 * np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.2f}{spread}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="the VOCdevkit folder")
    parser.add_argument("--part", choices=("frozen", "finetuned"), default="frozen")
    parser.add_argument("--methods", default=";".join(METHODS), help="names, separated by semicolons")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", default="3e-4,1e-3,3e-3,1e-2", help="the grid of learning rates")
    parser.add_argument("--rates-of", type=Path, help="the JSON of another part, for its learning rates")
    parser.add_argument("--backbone-rate", type=float, default=2e-4, help="the learning rate of a fine-tuned backbone")
    parser.add_argument("--linear-path", type=float, default=0, help="the learning rate of model.head.residual=pooled")
    parser.add_argument("--side", type=int, default=Benchmark.side, help="the side of the images in pixels")
    parser.add_argument("--epochs", default="10", help="the grid of numbers of epochs")
    parser.add_argument("--out", type=Path, default=Path("runs/photographs"))
    flags = parser.parse_args()
    methods = flags.methods.split(";")
    if unknown := sorted(set(methods) - set(METHODS)):
        parser.error(f"--methods: {unknown[0]!r} is none of {'; '.join(METHODS)}")
    rates, seeds = tuple(map(float, flags.rates.split(","))), tuple(map(int, flags.seeds.split(",")))
    epochs = tuple(map(int, flags.epochs.split(",")))
    rates_of = (
        {name: result["rate"] for name, result in json.loads(flags.rates_of.read_text()).items()}
        if flags.rates_of
        else {}
    )
    if missing := [name for name in methods if rates_of and name not in rates_of]:
        parser.error(f"--rates-of: {flags.rates_of} has no {missing[0]!r}")
    benchmark = Benchmark(
        flags.root,
        flags.part,
        flags.out,
        rates,
        seeds,
        epochs,
        rates_of,
        flags.backbone_rate,
        flags.linear_path,
        flags.side,
    )
    columns, results = frequent(flags.root), {}
    for method in methods:
        results[method] = compare(method, benchmark, columns)
        flags.out.mkdir(parents=True, exist_ok=True)
        (flags.out / f"{flags.part}.json").write_text(json.dumps(results, indent=1))
        (flags.out / f"{flags.part}.md").write_text(table(results))
        print(table(results), flush=True)


if __name__ == "__main__":
    use_large_pages()
    main()
