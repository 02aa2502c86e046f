"""Linear probes on the features of whole photographs."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.preprocessing import StandardScaler

from benchmarks.small_vit.crops import WHOLE, cut

STRENGTHS = tuple(10.0**k for k in range(-4, 3))  # of the penalty, chosen on a fifth of the training photographs


def features_of(backbone: nnx.Module, prepare, images: list[Image.Image], side: int) -> np.ndarray:
    """Return the features `cls` f32[n,D] of whole photographs, resized to a square."""
    graph, state = nnx.split(backbone)
    run = jax.jit(lambda state, pixels: nnx.merge(graph, state)(prepare(pixels)).cls)
    resized = (cut(image, WHOLE, side)[None].astype(np.float32) for image in images)
    return np.concatenate([np.asarray(run(state, pixels)) for pixels in resized])


def probe(train: np.ndarray, train_labels: np.ndarray, val: np.ndarray, val_labels: np.ndarray) -> dict:
    """Return the mAP of logistic regressions f[n,D] -> bool[n,K], with the penalty that is best on a fifth of train."""
    held_out = np.random.default_rng(0).permutation(len(train)) < len(train) // 5

    def score(strength: float, fit: tuple, measure: tuple) -> float:
        scaler = StandardScaler().fit(fit[0])
        features, others = scaler.transform(fit[0]), scaler.transform(measure[0])
        found = []
        for column in range(train_labels.shape[1]):
            model = LogisticRegression(C=strength, max_iter=1000).fit(features, fit[1][:, column])
            found.append(average_precision_score(measure[1][:, column], model.decision_function(others)))
        return float(np.mean(found))

    parts = [(train[rows], train_labels[rows]) for rows in (~held_out, held_out)]
    strength = max(STRENGTHS, key=lambda strength: score(strength, *parts))
    return {"mAP": score(strength, (train, train_labels), (val, val_labels)), "C": strength}
