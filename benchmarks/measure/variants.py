"""Compare settings of a training: losses where positives of the training labels are hidden, or kinds of mixing.

    python -m benchmarks.measure variants --compare=losses --data=digits --known=random:0.4 \\
        --config=q2l_resnet101:dataset=digits --cached
    python -m benchmarks.measure variants --compare=losses --data=photographs --root=/data/VOCdevkit --known=one \\
        --cached
    python -m benchmarks.measure variants --compare=mixing --data=photographs --root=/data/VOCdevkit

On digits, --config is trained on `train`; on photographs, a data set in the layout of VOC 2012, a linear classifier on
EfficientNet-Lite0, which is fine-tuned. With --cached, features of the frozen backbone are computed once, without
augmentation. All --variants have one recipe with --epochs; photographs have --side pixels. The learning rate of a
variant is the best of --rates in mAP on images with all labels: `val` of digits with the first of --seeds, or a fifth
of the photographs of `train`. Then the variant is trained once per seed. The test images are `test` of digits and `val`
of the photographs.

LL changes as many labels in the last epoch as positives are hidden on average, which EPR and ROLE know too. The results
are OUT/COMPARISON-DATA….json and .md: mAP, paired differences to the references with 95 % intervals over the images,
and the CPU seconds of a training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from ml_collections import ConfigDict

from benchmarks.measure import photographs, trainings
from benchmarks.measure.options import RATES, SEEDS, require_known
from benchmarks.report import over_seeds, publish
from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.labels.hidden import hide_positives
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.runtime.table import Table

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
class Options:
    compare: Literal["losses", "mixing"]
    data: Literal["digits", "photographs"] = "digits"
    known: str = "all"
    root: Path = Path()
    config: str = "finetune:dataset=digits"
    cached: bool = False
    variants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    rates: tuple[float, ...] = RATES
    epochs: int = 10
    side: int = 224
    out: Path = Path("runs/variants")

    @property
    def path(self) -> Path:
        """The part of the results that this command computes."""
        known = "" if self.known == "all" else f"-{Path(self.known).name.replace(':', '-')}"
        return self.out / f"{self.compare}-{self.data}{known}{'-cached' if self.cached else ''}"


def variant_config(variant: str, options: Options, *, rate: float, seed: int) -> ConfigDict:
    """Return the config of a training on all training images, without the keys that depend on the labels."""
    epochs = options.epochs
    if options.data == "digits":
        config = load_config(options.config, [])
        config.optim.learning_rate, config.seed = rate, seed
        config.train.epochs, config.train.patience, config.data.val_split = epochs, 0, ""
        config.data.test_splits, config.eval.select_on = ("val", "test"), "none"
        config.eval.every_epochs, config.log.tensorboard = epochs, False
        config.checkpoint.every_epochs, config.checkpoint.keep = max(1, epochs // 4), 1
        if options.cached:
            config.data.cache_features, config.augment = "float32", default_config().augment
            config.trainable = ((r"^backbone/", False), (r"", True))
    else:
        part = "frozen" if options.cached else "finetuned"
        probe = photographs.Options(options.root, part, side=options.side)
        config = photographs.method_config("linear probe", probe, rate=rate, epochs=epochs, seed=seed)
    config.data.known_positives = options.known
    config.loss.reduce, config.loss.scale = "mean", 1.0
    config.update_from_flattened_dict(COMPARISONS[options.compare][0][variant])
    return config


def add_label_counts(config: ConfigDict) -> None:
    """Give a config the mean number of positives per image, and the rate of LL that follows from it."""
    train = open_split(config.data, config.data.train_split, seed=config.seed)
    hidden = hide_positives(train, config.data)
    positives, known = ((split.labels[:] == POSITIVE).sum() / len(split) for split in (train, hidden))
    missing = (positives - known) / len(train.classes)
    config.loss.expected_positives = float(positives)
    config.loss.large_loss_rate = float(missing / max(1, config.train.epochs - 1))  # of labels per epoch


def compare(variant: str, options: Options, columns: np.ndarray) -> dict:
    """Return the results of a variant; train what is missing."""

    def training(rate: float, seed: int, tuned: bool) -> tuple[ConfigDict, Path]:
        config, folder = variant_config(variant, options, rate=rate, seed=seed), options.path / variant
        if tuned and options.data == "photographs":
            trainings.hold_out(config)
            folder /= "tune"
        if options.known != "all":
            add_label_counts(config)
        return config, folder / f"rate={rate:g},seed={seed}"

    on_digits = options.data == "digits"
    splits = {"tuned_on": "val" if on_digits else trainings.HELD_OUT, "measured_on": "test" if on_digits else "val"}
    rate, _, scores, common = trainings.compare(options.rates, training, options.seeds, columns, **splits)
    return {"rate": rate, "mAP": [*map(trainings.mean_ap, scores)], **common}


def table(results: dict[str, dict], references: tuple[str, ...]) -> str:
    """Return the Markdown table with differences to some of the variants."""
    references, rows = [name for name in references if name in results], []
    for name, result in results.items():
        differences = [trainings.difference(result, results[other]) for other in references]
        cells = [name, f"{result['rate']:g}", over_seeds(result["mAP"]), *differences]
        rows.append([*cells, f"{np.mean(result['cpu_seconds']):.0f}"])
    return Table(["variant", "rate", "mAP", *(f"− {name}" for name in references), "CPU s"], rows).markdown()


def measure(options: Options) -> Iterator[str]:
    known, for_features, references = COMPARISONS[options.compare]
    known = for_features if options.cached else tuple(known)
    variants, results = options.variants or known, {}
    require_known("variants", variants, known)
    columns = photographs.frequent(options.root) if options.data == "photographs" else np.arange(10)
    for variant in variants:
        results[variant] = compare(variant, options, columns)
        yield publish(options.path, results, table(results, references))
