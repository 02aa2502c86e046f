import math

import numpy as np
import pytest
from helpers.metric_cases import hard_case
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    precision_recall_curve,
    precision_score,
    recall_score,
    roc_auc_score,
)

from mlmoe_jax.evaluation.metrics import multilabel

KINDS = ("none", "envelope", "11point")


# --- scikit-learn


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_that_of_sklearn(seed):
    scores, labels, mask = hard_case(seed)
    ap = {kind: multilabel.average_precision(scores, labels, mask=mask, interpolation=kind) for kind in KINDS}
    for k in range(labels.shape[1]):
        y, s = labels[mask[:, k] > 0, k], scores[mask[:, k] > 0, k]
        if not y.any():
            assert k == 2
            assert all(math.isnan(values[k]) for values in ap.values())
            continue
        precision, recall, _ = precision_recall_curve(y, s)  # recall decreases; the last point is (0, 1) by convention
        envelope = np.maximum.accumulate(precision)[:-1]
        reached = [precision[:-1][recall[:-1] >= level / 10 - 1e-9].max() for level in range(11)]
        assert ap["none"][k] == pytest.approx(average_precision_score(y, s), abs=1e-12)
        assert ap["envelope"][k] == pytest.approx(-np.diff(recall) @ envelope, abs=1e-12)
        assert ap["11point"][k] == pytest.approx(np.mean(reached), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_roc_auc_is_that_of_sklearn(seed):
    scores, labels, mask = hard_case(seed)
    auc = multilabel.roc_auc(scores, labels, mask=mask)
    for k in range(labels.shape[1]):
        y, s = labels[mask[:, k] > 0, k], scores[mask[:, k] > 0, k]
        if k in (2, 5):  # only negatives, only positives
            assert math.isnan(auc[k])
        else:
            assert auc[k] == pytest.approx(roc_auc_score(y, s), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_means_of_average_precision_are_those_of_sklearn(seed):
    scores, labels, mask = hard_case(seed)
    kept = np.delete(np.arange(9), 2)  # scikit-learn counts a class without positives as 0
    of_class = multilabel.per_class(scores[:, kept], labels[:, kept])
    expected = {
        average: average_precision_score(labels[:, kept], scores[:, kept], average=average)
        for average in ("macro", "weighted")
    }
    assert multilabel.mean_average_precision(of_class["AP"]) == pytest.approx(expected["macro"], abs=1e-12)
    weighted = multilabel.mean_average_precision(of_class["AP"], weights=of_class["positives"])
    assert weighted == pytest.approx(expected["weighted"], abs=1e-12)
    of_class = multilabel.per_class(scores, labels)
    assert multilabel.mean_average_precision(of_class["AP"], weights=of_class["positives"]) == pytest.approx(weighted)
    known = mask > 0
    micro = average_precision_score(labels[known], scores[known])
    assert multilabel.micro_average_precision(scores, labels, mask=mask) == pytest.approx(micro, abs=1e-12)
    envelope = multilabel.micro_average_precision(scores, labels, mask=mask, interpolation="envelope")
    one_class = multilabel.average_precision(scores[known][:, None], labels[known][:, None], interpolation="envelope")
    assert envelope == one_class[0] > micro


@pytest.mark.parametrize(("empty", "zero_division"), [("zero", 0.0), ("skip", np.nan)])
def test_figures_are_those_of_sklearn(empty, zero_division):
    scores, labels, _ = hard_case()
    predicted = scores > 1
    predicted[:, [2, 4]] = False
    options = dict(y_true=labels, y_pred=predicted, zero_division=zero_division)
    expected = {
        "CP": precision_score(average="macro", **options),
        "CR": recall_score(average="macro", **options),
        "CF1_mean": f1_score(average="macro", **options),
        "OP": precision_score(average="micro", **options),
        "OR": recall_score(average="micro", **options),
        "OF1": f1_score(average="micro", **options),
    }
    figures = multilabel.precision_recall_f1(predicted, labels, empty=empty)
    assert {key: figures[key] for key in expected} == pytest.approx(expected, abs=1e-12)
    options["zero_division"] = 0.0  # scikit-learn's own choice, whatever `empty` is
    macro = {"precision_macro": precision_score, "recall_macro": recall_score, "F1_macro": f1_score}
    expected = {name: score(average="macro", **options) for name, score in macro.items()}
    assert {key: figures[key] for key in expected} == pytest.approx(expected, abs=1e-12)
    cp, cr = figures["CP"], figures["CR"]
    assert figures["CF1"] == pytest.approx(2 * cp * cr / (cp + cr))
    assert figures["CF1"] != pytest.approx(figures["CF1_mean"], abs=1e-3)


# --- by hand


def test_eleven_point_recalls_are_exact():
    """The third of ten positives reaches recall 0.3, which 0.1 · 3 = 0.30000000000000004 would miss."""
    labels = np.array([1, 1, 1] + [0] * 90 + [1] * 7)[:, None]
    scores = -np.arange(100.0)[:, None]
    tail = 10 / 100
    ap = multilabel.average_precision(scores, labels, interpolation="11point")[0]
    assert ap == pytest.approx((4 * 1 + 7 * tail) / 11)


def test_the_mean_of_empty_classes_is_undefined():
    none = np.array([np.nan])
    assert math.isnan(multilabel.mean_average_precision(none))
    assert math.isnan(multilabel.mean_average_precision(none, weights=np.zeros(1)))


def test_figures_without_predictions_or_hits():
    labels, nothing = np.eye(2), np.zeros((2, 2))
    skip, zero = (multilabel.precision_recall_f1(nothing, labels, empty=empty) for empty in ("skip", "zero"))
    assert [key for key, value in skip.items() if math.isnan(value)] == ["CP", "CF1", "OP", "OF1"]
    assert set(zero.values()) == {0.0}
    assert set(multilabel.precision_recall_f1(1 - labels, labels).values()) == {0.0}


def test_with_one_only_precision_has_a_count_of_at_least_1():
    """The first class is never predicted, and the second has no positives."""
    labels, predicted = np.array([[1, 0, 1], [1, 0, 0]]), np.array([[0, 0, 1], [0, 1, 1]])
    figures = multilabel.precision_recall_f1(predicted, labels, empty="one")
    assert figures["CP"] == pytest.approx((0 / 1 + 0 / 1 + 1 / 2) / 3)
    assert figures["CR"] == pytest.approx((0 / 2 + 1 / 1) / 2)
    assert figures["OP"] == pytest.approx(1 / (1 + 1 + 2))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_is_a_sort_of_every_image(k):
    scores, _, mask = hard_case()
    scores[4], mask[5] = 0.5, 0
    expected = np.zeros(scores.shape, bool)
    for row, (s, m) in enumerate(zip(scores, mask, strict=True)):
        best = sorted(np.flatnonzero(m), key=lambda c: (-s[c], c))[:k]
        expected[row, best] = True
    np.testing.assert_array_equal(multilabel.top_k(scores, k, mask=mask), expected)
    assert multilabel.top_k(scores, 10).all()
    np.testing.assert_array_equal(multilabel.top_k(scores, k, minimum=1, mask=mask), expected & (scores >= 1))


def test_map_at_k_is_a_sum_over_returned_positives():
    scores, labels, mask = hard_case()
    for minimum in (None, 0.8):
        returned, values = multilabel.top_k(scores, 3, minimum=minimum, mask=mask), []
        for k in np.delete(np.arange(9), 2):
            at_least = [(s <= scores[:, k]) & returned[:, k] for s in scores[:, k]]
            hits = returned[:, k] & (labels[:, k] == 1)
            precision = [labels[:, k][at].mean() for at, hit in zip(at_least, hits, strict=True) if hit]
            values.append(sum(precision) / (labels[:, k] * mask[:, k]).sum())
        assert multilabel.map_at_k(scores, labels, 3, mask=mask, minimum=minimum) == pytest.approx(np.mean(values))
