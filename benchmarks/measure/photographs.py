"""Compare heads on photographs, on an EfficientNet-Lite0 that is frozen or fine-tuned.

    python -m benchmarks.measure photographs --root=/data/VOCdevkit --part=frozen --out=runs/photographs

The photographs have the splits `train` and `val`, and --side pixels. All --methods have one recipe, equal widths and
equal tuning: the learning rate and the number of epochs are chosen from --rates and --epochs on a fifth of `train`,
drawn with the first seed, and then the method is trained on all of `train` once for each of --seeds. `val` is only
scored, once per training. Nothing is selected during a training: the last moving average counts.

--linear-path=1e-2 adds a linear classifier of the mean patch to the logits of all heads with a query decoder.

A fine-tuned backbone has its own learning rate for all heads, --backbone-rate. --rates-of=OUT/frozen.json takes the
rate of each head from the frozen part instead of tuning it again. A grid of one value is not tuned.

The frozen part trains on cached features (data.cache_features), without augmentation.

The results are OUT/PART.json and OUT/PART.md: mAP, CF1 and OF1 over the classes with at least ten positives in `val`,
co-occurrence overfitting, and the CPU seconds of a training, all its threads together.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from ml_collections import ConfigDict

from benchmarks.measure import trainings
from benchmarks.measure.options import RATES, SEEDS, require_known
from benchmarks.report import over_seeds, publish
from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.table import Table

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
LEAST_POSITIVES = 10
METRICS = ("mAP", f"CF1@{trainings.THRESHOLD:g}", f"OF1@{trainings.THRESHOLD:g}")
GAPS = ("cooccurrence/fpr_gap", "cooccurrence/auc_gap")


@dataclass(frozen=True)
class Options:
    root: Path
    part: Literal["frozen", "finetuned"] = "frozen"
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: tuple[int, ...] = SEEDS
    rates: tuple[float, ...] = RATES
    rates_of: str = ""
    backbone_rate: float = 2e-4
    linear_path: float = 0.0
    side: int = 224
    epochs: tuple[int, ...] = (10,)
    out: Path = Path("runs/photographs")


# ------------------------------------------------------------------------------------------------------------- configs
def method_config(method: str, options: Options, *, rate: float, epochs: int, seed: int) -> ConfigDict:
    """Return the config of a method with the common recipe, on all of `train`; `rate` is the head's learning rate."""
    name, colon, more = METHODS[method].partition(":")
    arguments = f"dataset=voc2012,root={options.root},backbone={BACKBONE},resolution={options.side}"
    config = load_config(f"{name}:{arguments}{',' if colon else ''}{more}", [])
    use_widths(config.model.head)
    use_recipe(config, epochs)
    config.seed, config.optim.learning_rate = seed, rate
    rules = ()
    if options.linear_path:
        config.model.head.residual, rules = "pooled", ((r"^head/pooled/", options.linear_path / rate),)
    if options.part == "frozen":
        config.optim.rate_rules = rules
        config.trainable = ((r"^backbone/", False), (r"", True))
        config.data.cache_features = "float32"
    else:
        config.trainable = ((r"", True),)
        config.model.backbone.batch_norm = "running"
        config.optim.rate_rules = (*rules, (r"^backbone/", options.backbone_rate / rate))
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
def rates_of(options: Options) -> dict[str, tuple[float, ...]]:
    """Return the grid of learning rates of each method."""
    require_known("methods", options.methods, METHODS)
    if not options.rates_of:
        return dict.fromkeys(options.methods, options.rates)
    tuned = json.loads(Path(options.rates_of).read_text())
    if missing := [name for name in options.methods if name not in tuned]:
        raise UserError(f"--rates-of: {options.rates_of} has no {missing[0]!r}")
    return {name: (tuned[name]["rate"],) for name in options.methods}


def frequent(root: Path) -> np.ndarray:
    """Return the columns of the classes with enough positives in `val`."""
    data = default_config().data
    data.name, data.root = "voc2012", str(root)
    labels = open_split(data, "val").labels[:]
    return np.flatnonzero((labels == 1).sum(axis=0) >= LEAST_POSITIVES)


def compare(method: str, rates: tuple[float, ...], options: Options, columns: np.ndarray) -> dict:
    """Return the results of a method with the best of its learning rates; train what is missing."""
    folder = options.out / options.part / METHODS[method].replace(":", "_")

    def training(choice: tuple[float, int], seed: int, tuned: bool) -> tuple[ConfigDict, Path]:
        rate, epochs = choice
        config = method_config(method, options, rate=rate, epochs=epochs, seed=seed)
        if tuned:
            trainings.hold_out(config)
        return config, folder / (
            f"tune-{trainings.text_of(choice)}" if tuned else f"{trainings.text_of(choice)},seed={seed}"
        )

    choices = itertools.product(rates, options.epochs)
    splits = {"tuned_on": trainings.HELD_OUT, "measured_on": "val"}
    best, folders, scores, common = trainings.compare(choices, training, options.seeds, columns, **splits)
    gaps = [json.loads((place / "results.json").read_text())["val"]["metrics"] for place in folders]
    metrics = [trainings.measure(one)(np.ones((len(one), 1), np.float32)) for one in scores]
    return {
        "rate": best[0],
        "epochs": best[1],
        "classes": [StoredRun(RunFolder(folders[-1])).labels[column] for column in columns],
        **{key: [float(values[key][0]) for values, _ in metrics] for key in METRICS},
        **{key: [one.get(key, float("nan")) for one in gaps] for key in GAPS},
        "AP": np.mean([per_class[0] for _, per_class in metrics], axis=0).tolist(),
        **common,
    }


# -------------------------------------------------------------------------------------------------------------- output
def table(results: dict[str, dict]) -> str:
    """Return the Markdown table; differences are to the first method, with the interval of the paired bootstrap."""
    first, rows = next(iter(results)), []
    for method, result in results.items():
        mean_ap, *rest = (over_seeds(result[name]) for name in (*METRICS, *GAPS))
        chosen = [method, f"{result['rate']:g}", result["epochs"], mean_ap]
        against = trainings.difference(result, results[first])
        rows.append([*chosen, against, *rest, f"{np.mean(result['cpu_seconds']):.0f}"])
    columns = ["head", "rate", "epochs", "mAP", f"− {first}", "CF1", "OF1", "FPR gap", "AUC gap", "CPU s"]
    return Table(columns, rows).markdown()


def measure(options: Options) -> Iterator[str]:
    results, columns = {}, frequent(options.root)
    for method, rates in rates_of(options).items():
        results[method] = compare(method, rates, options, columns)
        yield publish(options.out / options.part, results, table(results))
