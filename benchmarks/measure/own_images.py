"""Compare the logistic regression of train.fit=logistic with scikit-learn's on the same features.

    mlmoe features --output=features \
      --config=linear_probe:dataset=voc2012,root=/data/VOCdevkit,backbone=efficientnet_lite0,resolution=224 \
      --config.model.backbone.batch_norm=frozen --config.model.backbone.normalization=auto
    python -m benchmarks.measure own_images --features=features --out=runs/own_images

--features is a folder of mlmoe features with the splits `train` and `val`. First all classifiers are fitted on --draws
draws of --images images of `train`, and scored on the remaining images, over the labels with ten positives in these
images and one in the draw. Then they are fitted on all of `train` and scored on `val`, over the labels with ten
positives in `val`.

LogisticRegression and LogisticRegressionCV have their defaults, but as many iterations as they need.
LogisticRegressionCV chooses a penalty per label. It refuses labels with fewer than five positives, for which
LogisticRegression is used. Difficult labels count as absent. The results are OUT/own_images.json: mAP in percent,
differences over draws, and processor seconds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV

from benchmarks.report import publish, t_interval
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.evaluation.metrics.multilabel import per_class
from mlmoe_jax.training.logistic.penalty_search import fit_logistic

LEAST_POSITIVES, LEAST_FOR_FOLDS, ITERATIONS = 10, 5, 10_000
Fit = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # features, codes -> weights [D,K], biases [K]


def ours(features: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the classifiers of train.fit=logistic."""
    fit = fit_logistic(features, codes)
    return fit.kernel, fit.bias


def theirs(kind: type, features: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the classifiers of a class of scikit-learn; zeros for labels with one value."""
    kernel, bias = np.zeros((features.shape[1], codes.shape[1])), np.zeros(codes.shape[1])
    for k, positive in enumerate((codes == POSITIVE).T):
        if positive.any() and not positive.all():
            regression = kind if positive.sum() >= LEAST_FOR_FOLDS else LogisticRegression
            model = regression(max_iter=ITERATIONS).fit(features, positive)
            kernel[:, k], bias[k] = model.coef_[0], model.intercept_[0]
    return kernel, bias


FITS: dict[str, Fit] = {
    "ours": ours,
    **{kind.__name__: partial(theirs, kind) for kind in (LogisticRegressionCV, LogisticRegression)},
}


def mean_ap(fit: Fit, train: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Return mAP in percent, and the processor seconds of the fit."""
    began = time.process_time()
    kernel, bias = fit(*train)
    seconds = time.process_time() - began
    (features, codes), counts = other, [(codes == POSITIVE).sum(axis=0) for _, codes in (train, other)]
    columns = np.flatnonzero((counts[0] > 0) & (counts[1] >= LEAST_POSITIVES))
    metrics = per_class((features @ kernel + bias)[:, columns], codes[:, columns] == POSITIVE)
    return {"mAP": float(100 * np.mean(metrics["AP"])), "labels": len(columns), "seconds": seconds}


def compare_fits(
    train: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Return the results of all classifiers."""
    return {name: mean_ap(fit, train, other) for name, fit in FITS.items()}


def read(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features f32[N,D] and codes i8[N,K] of a split."""
    return np.load(folder / f"{split}.cls.npy").astype(np.float32), np.load(folder / f"{split}.labels.npy")


@dataclass(frozen=True)
class Options:
    features: Path
    draws: int = 20
    images: int = 200
    out: Path = Path("runs/own_images")


def measure(options: Options) -> Iterator[str]:
    warnings.simplefilter("ignore", FutureWarning)  # about the defaults of scikit-learn
    train, val = read(options.features, "train"), read(options.features, "val")
    results: dict = {"draws": []}
    for seed in range(options.draws):
        first, rest = np.split(np.random.default_rng(seed).permutation(len(train[1])), [options.images])
        others = tuple(np.concatenate([part[rest], whole]) for part, whole in zip(train, val, strict=True))
        methods = compare_fits(tuple(part[first] for part in train), others)
        results["draws"].append(methods)
        shown = {name: round(values["mAP"], 2) for name, values in methods.items()}
        yield f"{seed} {shown}"
    if options.draws > 1:
        results["ours minus"] = {}
        for name in list(FITS)[1:]:
            mean, half = t_interval([one["ours"]["mAP"] - one[name]["mAP"] for one in results["draws"]])
            results["ours minus"][name] = {"mean": mean, "half": half}
        yield f"ours minus {results['ours minus']}"
    results["all"] = compare_fits(train, val)
    yield f"all of train: {results['all']}"
    publish(options.out / "own_images", results)
