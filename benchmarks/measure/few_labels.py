"""Measure what vectors of label names add to a fit on few photographs, with a stand-in for the vectors.

    python -m benchmarks.measure few_labels --root=/data/VOCdevkit --out=runs/few_labels

The features of EfficientNet-Lite0 are normalized. Half of `train` stands for the texts: the vectors are the
weights of a logistic regression on it, with noise of their norm times one of --noises. From the other half --images
images of each label are drawn, once for each of --seeds, which also draws the halves and the noise. The logistic
regression of train.fit is fitted to them, without the vectors and drawn towards them, and the mAP is measured on `val`,
over the labels with at least ten positives there. The row of 0 images is the vectors alone.

The results are OUT/few_labels.json and OUT/few_labels.md. With --page the table replaces the one in this page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import photographs
from benchmarks.measure.label_selection import Images, mean_ap, read_images
from benchmarks.measure.options import SEEDS
from benchmarks.report import over_seeds, publish, write_between
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.labels.name_vectors import unit
from mlmoe_jax.runtime.table import Table
from mlmoe_jax.training.logistic.penalty_search import Origin, fit_logistic

MARKS = ("<!-- few labels -->", "<!-- end of few labels -->")


@dataclass(frozen=True)
class Options:
    root: Path
    images: tuple[int, ...] = (1, 2, 4, 8, 16)
    noises: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    seeds: tuple[int, ...] = SEEDS
    out: Path = Path("runs/few_labels")
    page: str = ""


def halves(images: Images, draw: np.random.Generator) -> tuple[Images, Images]:
    """Return two random halves of the images."""
    order = draw.permutation(len(images.codes))
    middle = len(order) // 2
    return images.take(order[:middle]), images.take(order[middle:])


def few_of_each(codes: np.ndarray, columns: np.ndarray, count: int, draw: np.random.Generator) -> np.ndarray:
    """Return the rows of `count` images of each label, or of all if there are fewer; an image has other labels too."""
    rows = [draw.permutation(np.flatnonzero(codes[:, column] == POSITIVE))[:count] for column in columns]
    return np.unique(np.concatenate(rows))


def noisy(origin: Origin, noise: float, draw: np.random.Generator) -> Origin:
    """Return classifiers whose weights have noise of their norm times `noise`, for each label."""
    direction = unit(draw.normal(size=origin.kernel.T.shape)).T
    added = noise * direction * np.linalg.norm(origin.kernel, axis=0)
    return Origin((origin.kernel + added).astype(np.float32), origin.bias)


def compare(train: Images, measured: Images, columns: np.ndarray, options: Options, seed: int) -> dict[str, dict]:
    """Return number of images -> name -> mAP; a name is `without`, or the noise of the vectors."""
    draw = np.random.default_rng(seed)
    texts, pool = halves(train, draw)
    fitted = fit_logistic(texts.features, texts.codes)
    vectors = {f"{noise:g}": noisy(Origin(fitted.kernel, fitted.bias), noise, draw) for noise in options.noises}
    found = {"0": {name: mean_ap(measured, columns, one.kernel, one.bias) for name, one in vectors.items()}}
    for count in options.images:
        few = pool.take(few_of_each(pool.codes, columns, count, draw))
        plain = fit_logistic(few.features, few.codes)
        found[str(count)] = {"without": mean_ap(measured, columns, plain.kernel, plain.bias)}
        for name, one in vectors.items():
            fit = fit_logistic(few.features, few.codes, origin=one)
            found[str(count)][name] = mean_ap(measured, columns, fit.kernel, fit.bias)
    return found


def table(results: dict[str, dict[str, dict]], noises: tuple[float, ...]) -> str:
    """Return the Markdown table of seed -> images -> name -> mAP, with the least difference of a seed."""
    rows = []
    for count in next(iter(results.values())):
        values = [one[count] for one in results.values()]
        plain = [one.get("without", np.nan) for one in values]
        row = [count, over_seeds(plain) if count != "0" else ""]
        for noise in noises:
            drawn = [one[f"{noise:g}"] for one in values]
            least = f" ({100 * np.min(np.subtract(drawn, plain)):+.2f})" if count != "0" else ""
            row.append(f"{over_seeds(drawn)}{least}")
        rows.append(row)
    return Table(["images per label", "without", *(f"noise {noise:g}" for noise in noises)], rows).markdown()


def measure(options: Options) -> Iterator[str]:
    train, val = (Images(unit(images.features), images.codes) for images in read_images(options.root))
    columns, results = photographs.frequent(options.root), {}
    for seed in options.seeds:
        results[str(seed)] = compare(train, val, columns, options, seed)
        yield publish(options.out / "few_labels", results, table(results, options.noises))
    if options.page:
        write_between(Path(options.page), MARKS, table(results, options.noises).strip())
