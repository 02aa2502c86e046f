import numpy as np
import pytest

from mlmoe_jax.evaluation.metrics import groups
from mlmoe_jax.evaluation.metrics.groups import GROUPS, Entries, evaluate_scores
from mlmoe_jax.evaluation.metrics.rates import harmonic, mean_defined, precision_recall_f1_of, ratio

HAMMING = """
from mlmoe_jax.evaluation.metrics.groups import MetricGroup


def measure(entries):
    wrong = (entries.scores >= 0.5) != entries.positive
    return {"hamming": float(wrong[entries.valid].mean())}


HAMMING = MetricGroup("Hamming loss", {"hamming": "share of the labels that are predicted wrongly"}, measure)
"""


def test_a_new_metric_is_one_file_and_one_line(tmp_path, monkeypatch):
    (tmp_path / "hamming_of_a_test.py").write_text(HAMMING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(GROUPS.entries, "hamming", "hamming_of_a_test:HAMMING")
    scores, labels = np.array([[0.9, 0.2], [0.4, 0.6]]), np.array([[1, 1], [0, 0]])
    report = evaluate_scores(scores, labels, np.array([[1, 1], [1, 0]]), {"0.5": 0.5})
    assert report["hamming"] == pytest.approx(1 / 3)
    assert next(iter(report)) == "mAP"


def test_what_groups_share_is_computed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(groups, "per_class", lambda *args, **options: calls.append(options) or {})
    entries = Entries(np.eye(2), np.eye(2, dtype=bool), np.ones((2, 2), bool), k=1)
    assert entries.of_class is entries.of_class
    assert len(calls) == 1
    np.testing.assert_array_equal(entries.top, np.eye(2, dtype=bool))


def test_every_group_has_a_heading_or_is_shown_otherwise():
    for name in GROUPS:
        assert GROUPS[name].caption
        assert GROUPS[name].meanings or name == "predictions"


def test_rates_of_counts():
    hits, claimed, actual = np.array([[1, 0, 0], [2, 1, 0]]), np.array([[2, 0, 1], [2, 2, 0]]), [[1, 3, 0], [4, 1, 0]]
    found = precision_recall_f1_of(hits, claimed, actual)
    np.testing.assert_allclose(found["CP"], [(1 / 2 + 0) / 2, (1 + 1 / 2) / 2])
    np.testing.assert_allclose(found["CR"], [(1 + 0) / 2, (1 / 2 + 1) / 2])
    np.testing.assert_allclose(found["OP"], [1 / 3, 3 / 4])
    np.testing.assert_allclose(found["OR"], [1 / 4, 3 / 5])
    np.testing.assert_allclose(found["CF1_mean"], [(2 / 3 + 0 + 0) / 3, (4 / 6 + 2 / 3) / 2])
    np.testing.assert_allclose(found["OF1"], [2 / 7, 2 * 3 / 4 * 3 / 5 / (3 / 4 + 3 / 5)])
    assert precision_recall_f1_of(hits[0], claimed[0], actual[0], fill=0.0)["CP"] == pytest.approx(1 / 6)


def test_quotients_and_means_leave_out_what_is_undefined():
    np.testing.assert_array_equal(ratio([1.0, 0.0], [2, 0]), [0.5, np.nan])
    assert ratio(3.0, 0, 1.0) == 1
    np.testing.assert_array_equal(mean_defined([[1.0, np.nan, 3.0], [np.nan] * 3]), [2, np.nan])
    assert mean_defined([0.25, np.nan]) == 0.25
    np.testing.assert_array_equal(harmonic([0.0, 1.0, np.nan], [0.0, 0.5, 1.0]), [0, 2 / 3, np.nan])
