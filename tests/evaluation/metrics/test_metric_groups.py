"""The groups of metrics: names, figures of labels with a tree, and what changes nothing."""

import math
import statistics

import numpy as np
import pytest
from helpers.metric_cases import evaluate_scores, hard_case, probable

from mlmoe_jax.config import default_config
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.evaluation.metrics import multilabel, ranking, reliability, threshold_search
from mlmoe_jax.evaluation.metrics.metric_groups import selectable_metrics
from mlmoe_jax.evaluation.metrics.ranking import INTERPOLATIONS as KINDS


def test_the_sample_deviation_is_that_of_the_standard_library():
    assert multilabel.sample_deviation([0.1, 0.4, 0.2]) == pytest.approx(statistics.stdev([0.1, 0.4, 0.2]))
    assert math.isnan(multilabel.sample_deviation([0.1]))


def test_evaluate_scores_names_every_figure():
    scores, labels, mask = hard_case()
    scores = probable(scores)
    cuts = {"0.5": 0.5, "prior_matched_transductive": threshold_search.prior_matched(scores, labels.mean(axis=0))}
    report = evaluate_scores(scores, labels, mask, cuts)
    parts = ("CP", "CR", "CF1", "CF1_mean", "OP", "OR", "OF1", "precision_macro", "recall_macro", "F1_macro")
    ranked = ("mAP", "mAP_envelope", "mAP_11point", "mAP_weighted", "mAP_micro", "AUC_macro", "precision@1", "mAP@3")
    at = ("0.5", "prior_matched_transductive", "top3", "top3_min0.5")
    calibrated = ("ECE_pooled", "ECE_macro", "Brier_pooled")
    assert list(report) == [*ranked, *(f"{part}@{name}" for name in at for part in parts), *calibrated]
    assert all(type(value) is float for value in report.values())
    of_class = multilabel.per_class(scores, labels, mask=mask)
    binned = reliability.reliability(scores, labels, mask=mask)
    expected = {
        "mAP": np.nanmean(of_class["AP"]),
        "mAP_envelope": np.nanmean(of_class["AP_envelope"]),
        "mAP_11point": np.nanmean(of_class["AP_11point"]),
        "mAP_weighted": multilabel.mean_average_precision(of_class["AP"], weights=of_class["positives"]),
        "mAP_micro": multilabel.micro_average_precision(scores, labels, mask=mask),
        "AUC_macro": np.nanmean(of_class["AUC"]),
        "mAP@3": multilabel.map_at_k(scores, labels, 3, mask=mask),
        "ECE_pooled": binned.pooled().expected_calibration_error[0],
        "ECE_macro": binned.expected_calibration_error.mean(),
        "Brier_pooled": ((scores - labels) ** 2)[mask > 0].mean(),
    }
    assert {name: report[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    best = multilabel.precision_recall_f1(multilabel.top_k(scores, 3, mask=mask, minimum=0.5), labels, mask=mask)
    assert {part: report[f"{part}@top3_min0.5"] for part in parts} == best


TREE = LabelTree(((3, 0), (1, 0), (6, 3), (3, 5)), ((0, 2),))


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores of 40 images, of which 0 and 1 occur."""
    draw = np.random.default_rng(0)
    return draw.random((40, 7)) < 0.3, (draw.random((40, 7)) < 0.3).astype(np.float64)


def test_the_metrics_are_those_of_hiclass():
    """hiclass 5.0.8: precision, recall and f1 of the sets of labels with their ancestors, average="micro"."""
    labels, scores = drawn()
    metrics = evaluate_scores(scores, labels, None, {"0.5": 0.5}, tree=TREE)
    expected = {"hP@0.5": 0.5, "hR@0.5": 0.4827586206896552, "hF1@0.5": 0.49122807017543857}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_unknown_labels_do_not_count():
    labels, scores = np.array([[1, 0], [0, 0]]), np.array([[0.9, 0.1], [0.1, 0.9]])
    metrics = evaluate_scores(scores, labels, [[1, 1], [0, 1]], {"0.5": 0.5}, tree=LabelTree(((1, 0),)))
    assert (metrics["hP@0.5"], metrics["hR@0.5"]) == (1 / 2, 1)


def test_predictions_agree_with_the_tree_at_each_threshold():
    labels, _ = drawn()
    raw = np.random.default_rng(1).random((40, 7))
    limits = {"0.5": 0.5, "fitted": np.linspace(0.2, 0.8, 7)}
    metrics = evaluate_scores(raw, TREE.add_implied(labels), None, limits, tree=TREE, raw=raw)
    independent = evaluate_scores(raw, TREE.add_implied(labels), None, limits, tree=TREE)
    for name in limits:
        assert metrics[f"hF1@{name}"] == pytest.approx(metrics[f"OF1@{name}"]), "closed sets stay as they are"
        assert independent[f"hF1@{name}"] != pytest.approx(independent[f"OF1@{name}"])


def test_they_select_if_there_is_a_tree():
    config = default_config()
    assert "hF1@0.5" not in selectable_metrics(config)
    config.data.tree = "tree.yaml"
    labels, scores = drawn()
    for tree in (TREE, LabelTree(TREE.implies), LabelTree((), TREE.exclusive)):
        metrics = evaluate_scores(scores, labels, None, {"0.5": 0.5, "prior_matched_transductive": 0.5}, tree=tree)
        assert {name for name in selectable_metrics(config) if name.startswith("h")} <= metrics.keys()
    assert not [name for name in evaluate_scores(scores, labels, None, {"0.5": 0.5}) if name.startswith("h")]


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
