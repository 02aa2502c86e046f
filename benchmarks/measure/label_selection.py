"""Measure how many labels a probe on photographs needs if a model chooses the images to label.

    python -m benchmarks.measure label_selection --root=/data/VOCdevkit --penalty=0

A logistic regression on the cached features of EfficientNet-Lite0 starts with 100 random images of `train`. Then 100
images are chosen by one of --functions, those of `--mode=predict --select`, or at random, and labeled at a time, up to
half of `train`, and the probe is fitted again. The mAP is measured on `val`.

The target is the mean mAP of random images at half of `train`. A function needs the number of labels at which the mean
of its curves first reaches the target, interpolated between rounds. --penalty=0 chooses the penalty of the probe by
cross-validation in every round. All functions start with the same images, one start for each of --seeds. Finished
curves are read from OUT/penalty=C.json; OUT/penalty=C.md has the printed table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit

from benchmarks.measure import photographs
from benchmarks.measure.options import SEEDS, require_known
from benchmarks.report import left, publish
from mlmoe_jax.apps.tools.acquisition import METHODS, Candidates, choose_images, entropy, normalize, rarity
from mlmoe_jax.data.label_codes import POSITIVE, targets
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.metrics.multilabel import average_precision
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.runtime.table import Table
from mlmoe_jax.training.logistic.penalty_search import EXACT, PenaltySearch, fit_logistic, rotate

ROUND = 100  # images per round
RANDOM = "random"
FUNCTIONS = (RANDOM, *METHODS)


# ----------------------------------------------------------------------------------------------------------- simulation
@dataclass(frozen=True)
class Images:
    """Features f32[N,D] of images, and their label codes i8[N,K]."""

    features: np.ndarray
    codes: np.ndarray

    def take(self, rows: np.ndarray) -> Images:
        return Images(self.features[rows], self.codes[rows])


def read_images(root: Path) -> list[Images]:
    """Return the features and labels of `train` and `val`, from the cache if they are there."""
    config = photographs.method_config("linear probe", photographs.Options(root), rate=1e-2, epochs=1, seed=0)
    opened = [open_split(config.data, name) for name in ("train", "val")]
    extractor = FeatureExtractor.from_config(config, len(opened[0].classes))
    return [Images(extractor.cached(split).features.readable()[0], split.labels[:]) for split in opened]


def fit(images: Images, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel and the bias of a probe, see the module."""
    if not penalty:
        probe = fit_logistic(images.features, images.codes)
        return probe.kernel, probe.bias
    rotation = rotate(images.features)
    label, known = (flags.astype(np.float32) for flags in targets(images.codes, "negative"))
    fold = np.full(len(images.codes), -1)
    search = PenaltySearch(rotation.values, label, known, fold, np.zeros_like(label))
    point = search.solve(penalty, search.start(), EXACT)
    kernel = rotation.axes @ point.weights[:, :, -1]
    return kernel, point.biases[:, -1] - rotation.mean @ kernel


def mean_ap(images: Images, columns: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> float:
    """Return the mAP of a linear classifier over the labels `columns`."""
    precision = average_precision(images.features @ kernel + bias, images.codes == POSITIVE)
    return float(np.nanmean(precision[columns]))


def simulate(
    function: str, pool: Images, measured: Images, columns: np.ndarray, *, seed: int, penalty: float
) -> list[float]:
    """Return the mAP of the labels `columns` after each round, up to half of the pool."""
    count, half, curve = len(pool.codes), len(pool.codes) // 2, []
    labeled = np.random.default_rng(seed).permutation(count)[:ROUND]
    while True:
        known = pool.take(labeled)
        kernel, bias = fit(known, penalty)
        curve.append(mean_ap(measured, columns, kernel, bias))
        if len(labeled) == half:
            return curve
        rest, more = np.setdiff1d(np.arange(count), labeled), min(ROUND, half - len(labeled))
        if function == RANDOM:
            chosen = np.random.default_rng([seed, len(labeled)]).permutation(len(rest))[:more]
        else:
            features = pool.features[rest]
            weights = rarity((known.codes == POSITIVE).sum(axis=0))
            uncertainty = entropy(expit(features @ kernel + bias), weights)
            candidates = Candidates(uncertainty, normalize(features), normalize(known.features))
            chosen, _ = choose_images(function, candidates, more)
        labeled = np.concatenate([labeled, rest[chosen]])


# --------------------------------------------------------------------------------------------------------------- output
def rounds(half: int) -> np.ndarray:
    """Return the number of labels of each round."""
    return np.minimum(np.arange(ROUND, half + ROUND, ROUND), half)


def labels_to(target: float, curve: np.ndarray, labels: np.ndarray) -> float:
    """Return the number of labels at which a curve first reaches a target, by linear interpolation; nan if never."""
    at = int(np.argmax(curve >= target))
    if curve[at] < target:
        return float("nan")
    if at == 0:
        return float(labels[0])
    share = (target - curve[at - 1]) / (curve[at] - curve[at - 1])
    return float(labels[at - 1] + share * (labels[at] - labels[at - 1]))


def table(curves: dict[str, dict[str, list[float]]], half: int) -> str:
    """Return the Markdown table of function -> seed -> curve, the fewest labels first."""
    labels, target = rounds(half), np.mean([curve[-1] for curve in curves[RANDOM].values()])
    rows = []
    for name, by_seed in curves.items():
        every = np.array(list(by_seed.values()))
        needed = labels_to(target, every.mean(axis=0), labels)
        seeds = ", ".join(f"{labels_to(target, curve, labels):.0f}" for curve in every)
        cells = [name, f"{needed:.0f}", f"{100 * needed / half:.0f} %", seeds, f"{100 * every[:, -1].mean():.2f}"]
        rows.append((np.nan_to_num(needed, nan=np.inf), cells))
    columns = ["function", "labels", f"of {half}", left("each seed"), "mAP at half"]
    return Table(columns, [cells for _, cells in sorted(rows, key=lambda row: row[0])]).markdown()


@dataclass(frozen=True)
class Options:
    root: Path
    functions: tuple[str, ...] = FUNCTIONS
    seeds: tuple[int, ...] = SEEDS
    penalty: float = 0.1
    out: Path = Path("runs/label_selection")


def measure(options: Options) -> Iterator[str]:
    require_known("functions", options.functions, FUNCTIONS)
    names = list(dict.fromkeys([RANDOM, *options.functions]))
    train, val = read_images(options.root)
    columns = photographs.frequent(options.root)
    path = options.out / f"penalty={options.penalty:g}"
    stored = Path(f"{path}.json")
    curves = json.loads(stored.read_text()) if stored.exists() else {}
    for at, name in enumerate(names):
        for seed in options.seeds:
            if str(seed) not in curves.setdefault(name, {}):
                curves[name][str(seed)] = simulate(name, train, val, columns, seed=seed, penalty=options.penalty)
                publish(path, curves)
        tabulated = {name: {seed: curves[name][str(seed)] for seed in options.seeds} for name in names[: at + 1]}
        yield publish(path, curves, table(tabulated, len(train.codes) // 2))
