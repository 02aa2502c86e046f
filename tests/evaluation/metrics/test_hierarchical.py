import numpy as np
import pytest
from helpers.metric_cases import evaluate_scores

from mlmoe_jax.config import default_config
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.evaluation.metrics.metric_groups import selectable_metrics

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
