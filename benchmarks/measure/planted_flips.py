"""Plant wrong labels in photographs, and count how many of them an audit ranks first.

    python -m benchmarks.measure planted_flips --root=/data/VOCdevkit --out=runs/planted_flips

All images of `train` are audited by EfficientNet-Lite0. The labels of VOC count as right, although some of them are
wrong. Difficult labels are neither flipped nor audited. Flips of a share, --share, are drawn for each of --seeds, in
one of two ways:

* entries: a share of all labels of all images, so that nearly all flips add a label;
* positives: a share of the labels that images have, and as many of the labels that they lack.

The result is the share of the flips among as many labels, the most doubtful first: of all flips, of labels that were
removed and of labels that were added; and the share if missing and superfluous labels are ranked separately. It is in
OUT/planted_flips.json and .md, with the suggestions that an audit makes and the share of flips among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure.options import SEEDS
from benchmarks.report import over_seeds, publish
from mlmoe_jax.apps.audit.audit import Audit, extract_features, probe_config, ranked
from mlmoe_jax.config import load_config
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.table import Table
from mlmoe_jax.training.logistic.penalty_search import fit_logistic

DRAWS = ("entries", "positives")


def planted(codes: np.ndarray, draw: str, share: float, seed: int) -> np.ndarray:
    """Return the labels to flip, bool[N,K]: a share of the entries, or of the positives and as many negatives.

    Args:
      codes: label codes i8[N,K]. Only positive and negative labels are flipped.
      draw: one of DRAWS.
      share: share of the entries or positives.
      seed: draws the flips.
    """
    random, flips = np.random.default_rng(seed), np.zeros(codes.size, bool)
    positive, negative = (np.flatnonzero(codes == code) for code in (POSITIVE, NEGATIVE))
    if draw == "entries":
        known = np.concatenate([positive, negative])
        flips[random.choice(known, round(share * len(known)), replace=False)] = True
    else:
        for places in (positive, negative):
            flips[random.choice(places, round(share * len(positive)), replace=False)] = True
    return flips.reshape(codes.shape)


def shares(audit: Audit, flips: np.ndarray) -> dict[str, float]:
    """Return the shares of the flips among as many labels, and among the suggestions; flips of labels not judged count.

    Args:
      audit: the audit of the flipped labels.
      flips: bool[N,K].
    """
    suggested, removed = np.zeros_like(flips), audit.split.labels != POSITIVE
    suggested[tuple(audit.suggestions.T)] = True
    first = first_ranked(audit.confidence, int(flips.sum()))
    parts = [
        first_ranked(np.where(part, audit.confidence, np.nan), int(flips[part].sum())) for part in (removed, ~removed)
    ]
    return {
        "flips": int(flips.sum()),
        "found": float(first[flips].mean()),
        "found, removed": float(first[flips & removed].mean()),
        "found, added": float(first[flips & ~removed].mean()),
        "found per direction": float((parts[0] | parts[1])[flips].mean()),
        "suggestions": int(suggested.sum()),
        "found by suggestions": float(suggested[flips].mean()),
        "flips among suggestions": float(flips[suggested].mean()),
    }


def first_ranked(confidence: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` most doubtful labels, bool[N,K]."""
    first = np.zeros(confidence.shape, bool)
    first[tuple(ranked(confidence)[:count].T)] = True
    return first


def run(split: Split, features: np.ndarray, draw: str, share: float, seed: int) -> dict[str, float]:
    """Plant flips in a split, audit it, and return the measures."""
    flips = planted(split.labels, draw, share, seed)
    codes = np.where(flips, POSITIVE + NEGATIVE - split.labels, split.labels).astype(np.int8)
    flipped = Split(split.name, split.classes, codes, split.ids, split.images)
    fit = fit_logistic(features, codes, difficult="ignore", seed=seed)
    return shares(Audit(flipped, fit.held_out_scores, [], []), flips)


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return the Markdown table of draw -> the measures of each seed, shares in percent."""
    names, cells = list(next(iter(results.values()))[0]), []
    for draw, rows in results.items():
        columns = ([row[name] for row in rows] for name in names)
        cells.append([draw, *(f"{np.mean(c):,.0f}" if isinstance(c[0], int) else over_seeds(c) for c in columns)])
    return Table(["flips of", *names], cells).markdown()


@dataclass(frozen=True)
class Options:
    root: Path
    share: float = 0.05
    seeds: tuple[int, ...] = SEEDS
    out: Path = Path("runs/planted_flips")


def measure(options: Options) -> Iterator[str]:
    arguments = f"dataset=voc2012,root={options.root},backbone=efficientnet_lite0,resolution=224"
    config = probe_config(load_config(f"linear_probe:{arguments}", []))
    split, features = extract_features(open_split(config.data, "train"), config)
    results: dict[str, list[dict[str, float]]] = {}
    for draw in DRAWS:
        results[draw] = [run(split, features, draw, options.share, seed) for seed in options.seeds]
        yield publish(options.out / "planted_flips", results, table(results))
