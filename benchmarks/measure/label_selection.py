"""Measure how many labels a probe on photographs needs if a model chooses the images to label.

    python -m benchmarks.measure label_selection --root=/data/VOCdevkit --part=tuning --seeds=10,11,12
    python -m benchmarks.measure label_selection --root=/data/VOCdevkit --part=test --penalty=0

A logistic regression on the cached features of EfficientNet-Lite0 starts with 100 random images of the pool. Then 100
images are chosen by one of --functions and labeled at a time, up to half of the pool, and the probe is fitted again. In
the part `test` the pool is `train`, and the mAP is measured on `val`. The part `tuning`, with which the functions of
apps/tools/acquisition.py were chosen, measures on a fifth of `train`, drawn with the seed.

The target is the mean mAP of random images at half of the pool. A function needs the number of labels at which the mean
of its curves first reaches the target, interpolated between rounds. --penalty=0 chooses the penalty of the probe by
cross-validation in every round. All functions start with the same images, one start for each of --seeds. Finished
curves are read from OUT/PART-penalty=C.json; OUT/PART-penalty=C.md has the printed table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.special import expit

from benchmarks.measure import photographs
from benchmarks.measure.options import SEEDS, require_known
from benchmarks.report import left, publish
from mlmoe_jax.apps.tools.acquisition import METHODS, Candidates, choose_images, entropy, normalize, rarity
from mlmoe_jax.data.label_codes import POSITIVE, targets
from mlmoe_jax.data.sampling import assign_folds
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.metrics.multilabel import average_precision
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.runtime.table import Table
from mlmoe_jax.training.logistic.fit import read_features
from mlmoe_jax.training.logistic.penalty_search import EXACT, PenaltySearch, fit_logistic, rotate

ROUND = 100  # images per round
RANDOM = "random"


@dataclass(frozen=True)
class Round(Candidates):
    """The candidates of a round, with more than the functions of the product use.

    Attributes:
      scores: probabilities f32[N,K].
      positives: the number of labeled images with each label, i64[K].
      draw: random numbers.
    """

    scores: np.ndarray
    positives: np.ndarray
    draw: np.random.Generator

    @property
    def entropies(self) -> np.ndarray:
        """The entropy of each label, f64[N,K]."""
        return np.stack([entropy(column[:, None], np.ones(1)) for column in self.scores.T], axis=1)


Function = Callable[[Round, int], np.ndarray]


# ------------------------------------------------------------------------------------------------ acquisition functions
def highest(values: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-values, kind="stable")[:count]


def badge(one: Round, count: int, *, sampled: bool) -> np.ndarray:
    """Return images whose gradients are large and differ (J. T. Ash et al., "Deep batch active learning by diverse,
    uncertain gradient lower bounds", ICLR 2020).

    The gradient of the log loss of a linear probe at its own labels ŷ is (p − ŷ) ⊗ x, which is never formed.
    """
    errors = one.scores - (one.scores >= 0.5)
    squares = (errors**2).sum(axis=1)
    rows, nearest = [int(squares.argmax())], np.full(len(squares), np.inf)
    while len(rows) < count:
        last = rows[-1]
        products = (errors @ errors[last]) * (one.features @ one.features[last])
        nearest = np.minimum(nearest, np.maximum(squares + squares[last] - 2 * products, 0))
        nearest[rows] = 0
        share = nearest / nearest.sum()
        rows.append(int(one.draw.choice(len(share), p=share) if sampled else share.argmax()))
    return np.array(rows)


FUNCTIONS: dict[str, Function] = {
    RANDOM: lambda one, count: one.draw.permutation(len(one.scores))[:count],
    **{name: lambda one, count, name=name: choose_images(name, one, count)[0] for name in METHODS},
    "largest entropy of a label": lambda one, count: highest(one.entropies.max(axis=1), count),
    "smallest margin of a label": lambda one, count: highest(-np.abs(one.scores - 0.5).min(axis=1), count),
    "mean distance to certainty": lambda one, count: highest(-np.abs(one.scores - 0.5).mean(axis=1), count),
    "entropy, all labels equal": lambda one, count: highest(one.entropies.mean(axis=1), count),
    "expected rare positives": lambda one, count: highest(one.scores @ rarity(one.positives) ** 2, count),
    "BADGE": lambda one, count: badge(one, count, sampled=True),
    "BADGE, farthest first": lambda one, count: badge(one, count, sampled=False),
}


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
    return [Images(read_features(extractor.cached(split).features)[0], split.labels) for split in opened]


def parts_of(part: str, train: Images, val: Images, seed: int) -> tuple[Images, Images]:
    """Return the pool and the images for the mAP."""
    if part == "test":
        return train, val
    fold = assign_folds(train.codes, 5, seed)
    return train.take(np.flatnonzero(fold)), train.take(np.flatnonzero(fold == 0))


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
    function: Function, pool: Images, measured: Images, columns: np.ndarray, *, seed: int, penalty: float
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
        rest = np.setdiff1d(np.arange(count), labeled)
        candidates = pool.take(rest)
        scores = expit(candidates.features @ kernel + bias)
        positives = (known.codes == POSITIVE).sum(axis=0)
        draw = np.random.default_rng([seed, len(labeled)])
        features = normalize(candidates.features), normalize(known.features)
        one = Round(entropy(scores, rarity(positives)), *features, scores, positives, draw)
        labeled = np.concatenate([labeled, rest[function(one, min(ROUND, half - len(labeled)))]])


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
    part: Literal["tuning", "test"] = "test"
    functions: tuple[str, ...] = tuple(FUNCTIONS)
    seeds: tuple[int, ...] = SEEDS
    penalty: float = 0.1
    out: Path = Path("runs/label_selection")


def measure(options: Options) -> Iterator[str]:
    require_known("functions", options.functions, FUNCTIONS)
    names = list(dict.fromkeys([RANDOM, *options.functions]))
    train, val = read_images(options.root)
    columns = photographs.frequent(options.root)
    path = options.out / f"{options.part}-penalty={options.penalty:g}"
    stored = Path(f"{path}.json")
    curves = json.loads(stored.read_text()) if stored.exists() else {}
    for at, name in enumerate(names):
        for seed in options.seeds:
            pool, measured = parts_of(options.part, train, val, seed)
            if str(seed) not in curves.setdefault(name, {}):
                settings = {"seed": seed, "penalty": options.penalty}
                curves[name][str(seed)] = simulate(FUNCTIONS[name], pool, measured, columns, **settings)
                publish(path, curves)
        tabulated = {name: {seed: curves[name][str(seed)] for seed in options.seeds} for name in names[: at + 1]}
        yield publish(path, curves, table(tabulated, len(pool.codes) // 2))
