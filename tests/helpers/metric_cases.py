"""Scores, labels and masks for tests of metrics."""

import numpy as np

from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.metric_groups import measure_entries
from mlmoe_jax.evaluation.metrics.ranking import check_inputs


def hard_case(seed=0, images=60, classes=9):
    """Scores with many ties, a fifth of the entries masked, a class without positives and one without negatives."""
    random = np.random.default_rng(seed)
    labels = (random.random((images, classes)) < 0.3).astype(np.float32)
    scores = (random.normal(size=labels.shape) + labels).round(1).astype(np.float32)
    mask = (random.random(labels.shape) < 0.8).astype(np.float32)
    labels[:, 2], labels[:, 5] = 0, 1
    return scores, labels, mask


def probable(scores):
    return 1 / (1 + np.exp(-np.asarray(scores, np.float64)))


def evaluate_scores(scores, labels, mask, thresholds, **options) -> dict[str, float]:
    """Return all metrics of scores [B,K], labels [B,K] and a mask [B,K] or None; options as in `Entries`."""
    return measure_entries(Entries(*check_inputs(scores, labels, mask), thresholds, **options))
