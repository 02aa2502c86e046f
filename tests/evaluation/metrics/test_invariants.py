"""Invariants of all metrics: masked entries, blocks of rows and types of arrays."""

import numpy as np
import pytest
from helpers.metric_cases import evaluate_scores, hard_case, probable

from mlmoe_jax.evaluation.metrics import multilabel, ranking
from mlmoe_jax.evaluation.metrics.ranking import INTERPOLATIONS as KINDS


def all_metrics(scores, labels, mask):
    """Return all metrics that depend on scores only through their order or through the returned classes."""
    of_class = multilabel.per_class(scores, labels, mask=mask)
    micro = [multilabel.micro_average_precision(scores, labels, mask=mask, interpolation=kind) for kind in KINDS]
    predicted = multilabel.top_k(scores, 3, mask=mask)
    figures = multilabel.precision_recall_f1(predicted, labels, mask=mask)
    at_k = multilabel.map_at_k(scores, labels, 2, mask=mask)
    return np.concatenate([*of_class.values(), micro, list(figures.values()), [at_k]])


@pytest.mark.parametrize("value", [-99.0, 99.0, np.inf, -np.inf, np.nan])
def test_masked_entries_are_ignored(value):
    scores, labels, mask = hard_case()
    changed = np.where(mask > 0, scores, value), np.where(mask > 0, labels, 1 - labels)
    np.testing.assert_array_equal(all_metrics(*changed, mask), all_metrics(scores, labels, mask))
    cuts, scores = {"0.5": 0.5}, probable(scores)
    changed = np.where(mask > 0, scores, value), changed[1]
    assert evaluate_scores(*changed, mask, cuts) == evaluate_scores(scores, labels, mask, cuts)


@pytest.mark.parametrize("entries", [1, 20, 130])
def test_blocks_change_nothing(monkeypatch, entries):
    """A split is processed in blocks of rows, which are much larger than the splits of these tests."""
    scores, labels, mask = hard_case()
    scores = probable(scores)
    expected = all_metrics(scores, labels, mask), evaluate_scores(scores, labels, mask, {"0.5": 0.5})
    monkeypatch.setattr(ranking, "_ENTRIES", entries)
    np.testing.assert_array_equal(all_metrics(scores, labels, mask), expected[0])
    assert evaluate_scores(scores, labels, mask, {"0.5": 0.5}) == pytest.approx(expected[1], abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_type_of_scores_does_not_matter(dtype):
    scores, labels, mask = hard_case()
    scores = scores.astype(np.float16)
    expected = all_metrics(scores.astype(np.float64), labels, mask)
    np.testing.assert_array_equal(all_metrics(scores.astype(dtype), labels > 0, mask > 0), expected)
    np.testing.assert_array_equal(all_metrics(np.asfortranarray(scores.astype(dtype)), labels, mask), expected)
