"""Measure calibration and bounded misses of linear probes on photographs, on images that were not fitted on.

    python -m benchmarks.measure calibration --root=/data/VOCdevkit --out=runs/calibration

The linear probe of the measurement `photographs` on the frozen EfficientNet-Lite0 is trained on `train` with each loss
of PROBES. Everything is fitted on a random half of the images of `val` and measured on the other half, for --halves
halves (calibration) and --resamples halves (misses). The output is Markdown; metrics are in percent.

The expected calibration error of a few images is above 0 also for perfect scores. The row `limit` has the error of the
Platt scores if labels are drawn from these scores: no correction can be expected to be better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.measure import photographs, trainings
from benchmarks.report import heading, left, row
from mlmoe_jax.config import default_config
from mlmoe_jax.evaluation.decisions.calibration_fit import fit_scales
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.reliability import measure_calibration
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.decisions import to_logits

METHODS = ("temperature", "platt")
MISS_RATES = (0.05, 0.1, 0.2)
COLUMNS = ("ECE_macro", "ECE_pooled", "Brier_pooled")
RATE = 1e-2  # the tuned learning rate of the linear probe in the measurement `photographs`
# Name -> keys that differ from the probe of the measurement `photographs`.
PROBES: dict[str, dict[str, str | float]] = {
    "binary cross-entropy": {},
    "logistic regression": {"train.fit": "logistic"},
    "ASL": {"loss.kind": "asymmetric", "loss.gamma_neg": 4.0, "loss.gamma_pos": 0.0, "loss.clip": 0.05},
}


@dataclass(frozen=True)
class Options:
    root: Path
    out: Path = Path("runs/calibration")
    halves: int = 20
    resamples: int = 200


def score_probe(root: Path, keys: dict[str, str | float], folder: Path) -> SplitScores:
    """Return the scores of a probe on `val`; train it first if necessary."""
    config = photographs.method_config("linear probe", photographs.Options(root), rate=RATE, epochs=10, seed=0)
    config.update_from_flattened_dict(keys)
    return trainings.run(config, folder)["val"]


def halves(scored: SplitScores, count: int) -> Iterator[tuple[SplitScores, SplitScores]]:
    """Yield random halves of the images: to fit on, and to measure on."""
    for seed in range(count):
        first = np.random.default_rng(seed).permutation(len(scored)) < len(scored) // 2
        yield scored.take(first), scored.take(~first)


def arrays(scored: SplitScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    entries = scored.entries("negative")
    return entries.scores, entries.positive, entries.valid


def calibration_errors(scored: SplitScores, count: int) -> dict[str, dict[str, float]]:
    """Return method -> metric -> mean over halves, with `raw` scores and the `limit`."""
    values: dict[str, list[dict[str, float]]] = {}
    for seed, (fitted, measured) in enumerate(halves(scored, count)):
        raw, positive, valid = arrays(measured)
        corrected = {"raw": raw}
        for method in METHODS:
            own, present, known = arrays(fitted)
            function = fit_scales(to_logits(own), present, known, method=method)
            corrected[method] = function(to_logits(raw))
        for method, scores in corrected.items():
            values.setdefault(method, []).append(measure_calibration(Entries(scores, positive, valid)))
        drawn = np.random.default_rng(seed).random(raw.shape) < corrected["platt"]
        values.setdefault("limit", []).append(measure_calibration(Entries(corrected["platt"], drawn, valid)))
    return {
        method: {name: float(np.mean([one[name] for one in rows])) for name in rows[0]}
        for method, rows in values.items()
    }


def misses(scored: SplitScores, count: int) -> Iterator[tuple[str, float, np.ndarray]]:
    """Yield per, bound, and for each half [count,3] misses per image, misses per label, and predictions per image."""
    config, names = default_config(), [str(k) for k in range(scored.scores.shape[1])]
    config.data.difficult_eval, config.thresholds.goal = "negative", "miss_rate"
    for per in ("global", "class"):
        for miss_rate in MISS_RATES:
            config.thresholds.per, config.thresholds.miss_rate = per, miss_rate
            rows = []
            for fitted, measured in halves(scored, count):
                limits = fit_thresholds(fitted, names, config).limits(names)
                scores, positive, _ = arrays(measured)
                missed = positive & (scores < limits)
                by_image, by_label = (
                    np.mean(missed.sum(axis=axis)[present > 0] / present[present > 0])
                    for axis in (1, 0)
                    for present in [positive.sum(axis=axis)]
                )
                rows.append((by_image, by_label, np.mean((scores >= limits).sum(axis=1))))
            yield per, miss_rate, np.array(rows)


def with_standard_error(shares: np.ndarray) -> str:
    """Return the mean over halves in percent, with its standard error.

    The bound holds for the mean over all halves of the same images, so random halves are its only source of error.
    """
    return f"{100 * shares.mean():.2f} ± {100 * stats.sem(shares):.2f}"


def measure(options: Options) -> Iterator[str]:
    folders = {name: options.out / name.replace(" ", "_") for name in PROBES}
    probes = {name: score_probe(options.root, keys, folders[name]) for name, keys in PROBES.items()}
    yield heading("probe", left("scores"), "ECE_macro", "ECE_pooled", "Brier")
    for name, scored in probes.items():
        for method, values in calibration_errors(scored, options.halves).items():
            yield row(name, method, *(f"{100 * values[key]:.2f}" for key in COLUMNS))
    columns = ("bound", "missed per image", "missed per label", "labels per image")
    yield f"\n{heading('probe', left('thresholds'), *columns)}"
    for name, scored in probes.items():
        for per, bound, rows in misses(scored, options.resamples):
            *shares, predicted = rows.T
            yield row(name, per, f"{100 * bound:g}", *map(with_standard_error, shares), f"{predicted.mean():.2f}")
