"""Compare settings of a training: losses where positives of the training labels are hidden, or kinds of mixing.

    python -m benchmarks.variants --compare=losses --data=digits --known=random:0.4 \\
        --config=q2l_resnet101:dataset=digits --cached
    python -m benchmarks.variants --compare=losses --data=photographs --root=/data/VOCdevkit --known=one --cached
    python -m benchmarks.variants --compare=mixing --data=photographs --root=/data/VOCdevkit

On digits, --config is trained on `train`; on photographs, a data set in the layout of VOC 2012, a linear classifier on
EfficientNet-Lite0, which is fine-tuned. With --cached, features of the frozen backbone are computed once, without
augmentation. All variants have one recipe. The learning rate of a variant is the best of --rates in mAP on images with
all labels: `val` of digits with the first seed, or a fifth of the photographs of `train`. Then the variant is trained
once per seed. The test images are `test` of digits and `val` of the photographs.

LL changes as many labels in the last epoch as positives are hidden on average, which EPR and ROLE know too. Finished
trainings are read and an interrupted training resumes, so rerunning a command continues it. The results are
OUT/COMPARISON-DATA….json and .md: mAP, paired differences to the references with 95 % intervals over the images, and
the CPU seconds of a training.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from benchmarks import photographs
from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.labels.hidden import hide_positives
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.metrics.bootstrap import percentile_interval
from mlmoe_jax.evaluation.results import SplitScores, read_scores
from mlmoe_jax.runs.folder import RunFolder

_ASL = {"kind": "asymmetric", "unknown": "negative", "gamma_neg": 4.0, "clip": 0.05, "eps": 1e-8}
Variants = dict[str, dict[str, object]]  # name -> config keys that differ from the recipe
LOSSES: Variants = {
    "BCE": {"loss.kind": "bce", "loss.unknown": "negative"},
    "ASL": {f"loss.{key}": value for key, value in _ASL.items()},
    "Hill": {"loss.kind": "hill"},
    "focal margin": {"loss.kind": "focal_margin"},
    "SPLC": {"loss.kind": "splc"},
    "LL-R": {"loss.kind": "ll_r"},
    "LL-Ct": {"loss.kind": "ll_ct"},
    "LL-Cp": {"loss.kind": "ll_cp"},
    "AN": {"loss.kind": "an"},
    "WAN": {"loss.kind": "wan"},
    "AN-LS": {"loss.kind": "an_ls"},
    "EPR": {"loss.kind": "epr"},
    "ROLE": {"loss.kind": "role"},
    "DB": {"loss.kind": "distribution_balanced"},
}
MIXING: Variants = {
    "none": {},
    "MixUp": {"augment.mix": "mixup"},
    "CutMix": {"augment.mix": "cutmix", "augment.mix_alpha": 1.0},
    "both": {"augment.mix": "both"},
    "TrivialAugment": {"augment.randaugment": "trivial"},
    "erasing": {"augment.erase": 0.25},
}
# Comparison -> its variants, the variants of them for cached features, and the variants to which all are compared.
COMPARISONS: dict[str, tuple[Variants, tuple[str, ...], tuple[str, ...]]] = {
    "losses": (LOSSES, (*LOSSES,), ("BCE", "ASL")),
    "mixing": (MIXING, ("none", "MixUp"), ("none",)),
}


@dataclass(frozen=True)
class Benchmark:
    """The flags of the command line."""

    comparison: str
    data: str
    known: str
    root: str
    config: str
    cached: bool
    out: Path
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: int
    side: int = photographs.Benchmark.side

    @property
    def name(self) -> str:
        """The part of the results that this command computes."""
        known = "" if self.known == "all" else f"-{Path(self.known).name.replace(':', '-')}"
        return f"{self.comparison}-{self.data}{known}{'-cached' if self.cached else ''}"


def variant_config(variant: str, benchmark: Benchmark, *, rate: float, seed: int) -> ConfigDict:
    """Return the config of a training on all training images, without the keys that depend on the labels."""
    if benchmark.data == "digits":
        config = load_config(benchmark.config, [])
        config.optim.learning_rate, config.seed = rate, seed
        config.train.epochs, config.train.patience, config.data.val_split = benchmark.epochs, 0, ""
        config.data.test_splits, config.eval.select_on = ("val", "test"), "none"
        config.eval.every_epochs, config.log.tensorboard = benchmark.epochs, False
        config.checkpoint.every_epochs, config.checkpoint.keep = max(1, benchmark.epochs // 4), 1
        if benchmark.cached:
            config.data.cache_features, config.augment = "float32", default_config().augment
            config.trainable = ((r"^backbone/", False), (r"", True))
    else:
        part = "frozen" if benchmark.cached else "finetuned"
        flags = photographs.Benchmark(
            benchmark.root,
            part,
            benchmark.out,
            benchmark.rates,
            benchmark.seeds,
            (),
            {},
            2e-4,
            side=benchmark.side,
        )
        config = photographs.method_config("linear probe", flags, rate=rate, epochs=benchmark.epochs, seed=seed)
    config.data.known_positives = benchmark.known
    config.loss.reduce, config.loss.scale = "mean", 1.0
    config.update_from_flattened_dict(COMPARISONS[benchmark.comparison][0][variant])
    return config


def with_label_counts(config: ConfigDict) -> ConfigDict:
    """Return a config that has the mean number of positives per image, and the rate of LL that follows from it."""
    train = open_split(config.data, config.data.train_split, seed=config.seed)
    hidden = hide_positives(train, config.data)
    positives, known = ((split.labels == POSITIVE).sum() / len(split) for split in (train, hidden))
    missing = (positives - known) / len(train.classes)
    config.loss.expected_positives = float(positives)
    config.loss.large_loss_rate = float(missing / max(1, config.train.epochs - 1))  # of labels per epoch
    return config


def run(config: ConfigDict, folder: Path) -> tuple[SplitScores, SplitScores, float]:
    """Return the scores of the first and the last test split, and the CPU seconds; train first if necessary."""
    counted = config.data.known_positives == "all" or (folder / photographs.TIMES).exists()
    last = photographs.run(config if counted else with_label_counts(config), folder)
    seconds = json.loads((folder / photographs.TIMES).read_text())["cpu_seconds"]
    return read_scores(RunFolder(folder))[config.data.test_splits[0]], last, seconds


def mean_ap(scores: SplitScores, columns: np.ndarray) -> float:
    """Return the mAP of some classes."""
    scored = scores.with_labels(columns)
    return float(photographs.measure(scored)(np.ones((len(scored), 1), np.float32))[0]["mAP"][0])


def compare(variant: str, benchmark: Benchmark, columns: np.ndarray) -> dict:
    """Return the results of a variant; train what is missing."""
    folder, tuning = benchmark.out / benchmark.name / variant, {}
    for rate in benchmark.rates if len(benchmark.rates) > 1 else ():
        config, place = variant_config(variant, benchmark, rate=rate, seed=benchmark.seeds[0]), folder
        if benchmark.data == "photographs":
            held_out, place = photographs.HELD_OUT, folder / "tune"
            config.data.val_split, config.data.val_fraction, config.data.test_splits = held_out, 0.2, (held_out,)
        tuning[f"{rate:g}"] = mean_ap(run(config, place / f"rate={rate:g},seed={benchmark.seeds[0]}")[0], columns)
    rate = float(max(tuning, key=tuning.get, default=benchmark.rates[0]))
    runs = [
        run(variant_config(variant, benchmark, rate=rate, seed=seed), folder / f"rate={rate:g},seed={seed}")
        for seed in benchmark.seeds
    ]
    scores = [scored.with_labels(columns) for _, scored, _ in runs]
    return {
        "rate": rate,
        "tuning": tuning,
        "mAP": [mean_ap(scored, columns) for _, scored, _ in runs],
        "cpu_seconds": [seconds for *_, seconds in runs],
        "resampled_mAP": photographs.resampled_map(scores).tolist(),
    }


def table(results: dict[str, dict], references: tuple[str, ...]) -> str:
    """Return the Markdown table with differences to some of the variants."""
    references = [name for name in references if name in results]
    lines = ["| variant | rate | mAP | " + "".join(f"− {name} | " for name in references) + "CPU s |"]
    lines.append("|---|---:|---:|" + "---:|" * len(references) + "---:|")
    for name, result in results.items():
        differences = [difference(result, results[other]) if other != name else "" for other in references]
        cells = [name, f"{result['rate']:g}", photographs.over_seeds(result["mAP"]), *differences]
        lines.append("| " + " | ".join([*cells, f"{np.mean(result['cpu_seconds']):.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def difference(one: dict, other: dict) -> str:
    """Return the difference of two mAPs in points with its interval over resamples of the images."""
    low, high = percentile_interval(100 * (np.array(one["resampled_mAP"]) - np.array(other["resampled_mAP"])))
    return f"{100 * (np.mean(one['mAP']) - np.mean(other['mAP'])):+.2f} [{low:+.2f}, {high:+.2f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", choices=tuple(COMPARISONS), required=True)
    parser.add_argument("--data", choices=("digits", "photographs"), default="digits")
    parser.add_argument("--known", default="all", help="data.known_positives, such as one or random:0.4")
    parser.add_argument("--root", default="", help="the VOCdevkit folder of the photographs")
    parser.add_argument("--config", default="finetune:dataset=digits", help="the config that is trained on digits")
    parser.add_argument("--cached", action="store_true", help="train on cached features")
    parser.add_argument("--variants", default="", help="names, separated by semicolons; all by default")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", default="3e-4,1e-3,3e-3,1e-2", help="the grid of learning rates")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--side", type=int, default=Benchmark.side, help="the side of the photographs in pixels")
    parser.add_argument("--out", type=Path, default=Path("runs/variants"))
    flags = parser.parse_args()
    known, for_features, references = COMPARISONS[flags.compare]
    known = for_features if flags.cached else tuple(known)
    variants = flags.variants.split(";") if flags.variants else known
    if unknown := sorted(set(variants) - set(known)):
        parser.error(f"--variants: {unknown[0]!r} is none of {'; '.join(known)}")
    rates, seeds = tuple(map(float, flags.rates.split(","))), tuple(map(int, flags.seeds.split(",")))
    what = (flags.compare, flags.data, flags.known, flags.root, flags.config, flags.cached)
    benchmark = Benchmark(*what, flags.out, rates, seeds, flags.epochs, flags.side)
    columns = photographs.frequent(flags.root) if flags.data == "photographs" else np.arange(10)
    results = {}
    flags.out.mkdir(parents=True, exist_ok=True)
    for variant in variants:
        results[variant] = compare(variant, benchmark, columns)
        text = table(results, references)
        (flags.out / f"{benchmark.name}.json").write_text(json.dumps(results, indent=1))
        (flags.out / f"{benchmark.name}.md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    photographs.use_large_pages()
    main()
