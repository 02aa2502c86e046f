import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from mlmoe_jax.evaluation.metrics.cooccurrence import (
    PAIR_COLUMNS,
    Pair,
    pair_biases,
    summarize,
    training_pairs,
)

PAIR = Pair(a=0, b=1, p_b_given_a=0.9, p_b=0.4, support=50)


def random_case(images=200, classes=4):
    random = np.random.default_rng(0)
    labels = random.random((images, classes)) < 0.4
    scores = ((random.random(labels.shape) + 0.5 * labels) / 1.5).round(2)
    return scores, labels, random.random(labels.shape) < 0.8


# --- pairs


def test_choice_of_pairs():
    """Of 100 images, 60 have label 0, 20 label 1, 10 label 2."""
    counts, positives = np.array([[0, 11, 9], [11, 0, 2], [9, 2, 0]]), np.array([60, 20, 10])
    strong, weak = Pair(2, 0, p_b_given_a=0.9, p_b=0.6, support=9), Pair(0, 2, p_b_given_a=0.15, p_b=0.1, support=9)
    # p(0 | 1) = 0.55 is above the level but below p(0) = 0.6: the two co-occur less often than by chance.
    for level, support, pairs in ((0.5, 1, [strong]), (0.1, 1, [strong, weak]), (0.1, 10, [])):
        assert training_pairs(counts, positives, 100, level=level, support=support) == pairs


# --- figures


def test_figures_equal_a_loop_over_images():
    scores, labels, mask = random_case()
    cuts = np.array([0.2, 0.6, 0.4, 0.5])
    pairs = [replace(PAIR, a=a, b=b) for a, b in ((0, 1), (3, 2), (1, 0))]
    rows = pair_biases(scores, labels, pairs, cuts, mask=mask, fewest=1)
    spoilt = np.where(mask, scores, np.nan), np.where(mask, labels, ~labels)
    assert pair_biases(*spoilt, pairs, cuts, mask=mask, fewest=1) == rows, "masked entries are ignored"
    for pair, figures in zip(pairs, rows, strict=True):
        assert vars(pair).items() <= figures.items()
        cells = {(a, b): [] for a in (True, False) for b in (True, False)}
        for s, y, m in zip(scores, labels, mask, strict=True):
            if m[pair.a] and m[pair.b]:
                cells[y[pair.a], y[pair.b]].append(s[pair.b])
        names = {"both": (True, True), "a_only": (True, False), "b_only": (False, True), "neither": (False, False)}
        for name, cell in names.items():
            assert figures[f"images_{name}"] == len(cells[cell])
        for a, side in ((True, "with_a"), (False, "without_a")):
            assert figures[f"score_{side}"] == pytest.approx(np.mean(cells[a, False]))
            assert figures[f"fpr_{side}"] == pytest.approx(np.mean([s >= cuts[pair.b] for s in cells[a, False]]))
        absent = scores[mask[:, pair.b] & ~labels[:, pair.b], pair.b]
        for a, side in ((True, "cooccurring"), (False, "exclusive")):
            y, s = np.r_[np.ones(len(cells[a, True])), np.zeros(len(absent))], np.r_[cells[a, True], absent]
            assert figures[f"ap_{side}"] == pytest.approx(average_precision_score(y, s))
            assert figures[f"auc_{side}"] == pytest.approx(roc_auc_score(y, s))
        summary = summarize({"": [figures]})[""]
        assert summary["fpr_gap"] == figures["fpr_with_a"] - figures["fpr_without_a"]
        assert summary["score_gap"] == figures["score_with_a"] - figures["score_without_a"]
        assert summary["auc_gap"] == figures["auc_cooccurring"] - figures["auc_exclusive"]


# --- few images, several splits


def test_cells_with_few_images_are_undefined():
    labels = np.zeros((40, 2), bool)
    labels[:20, 0] = True
    labels[3:30, 1] = True  # both 17, only a 3, only b 10, neither 10
    scores = np.linspace(0, 1, 80).reshape(40, 2)
    for fewest, undefined in (
        (3, ()),
        (4, ("fpr_with_a", "score_with_a")),
        (11, ("fpr_with_a", "score_with_a", "fpr_without_a", "score_without_a", "ap_exclusive", "auc_exclusive")),
    ):
        row = pair_biases(scores, labels, [PAIR], 0.5, fewest=fewest)[0]
        assert {name for name, value in row.items() if math.isnan(value)} == set(undefined)
    labels[:, 1] = True
    row = pair_biases(scores, labels, [PAIR], 0.5, fewest=0)[0]
    assert math.isnan(row["ap_cooccurring"])
    assert math.isnan(row["fpr_with_a"])


def bias(**figures):
    return dict.fromkeys(PAIR_COLUMNS, 0.5) | figures


def test_splits_average_the_same_pairs():
    test = [bias(fpr_with_a=0.9), bias(fpr_with_a=math.nan), bias(fpr_with_a=0.7)]
    shift = [bias(fpr_with_a=0.6), bias(fpr_with_a=0.8), bias(ap_exclusive=math.nan)]
    summary = summarize({"test": test, "test_shift": shift})
    assert summary["test"]["fpr_with_a"] == pytest.approx((0.9 + 0.7) / 2)
    assert summary["test_shift"]["fpr_with_a"] == pytest.approx((0.6 + 0.5) / 2)
    assert summary["test_shift"]["fpr_gap"] == pytest.approx((0.1 + 0) / 2)
    assert summarize({"test_shift": shift})["test_shift"]["fpr_with_a"] == pytest.approx((0.6 + 0.8 + 0.5) / 3)
    assert summarize({"test": test[1:2]})["test"].keys().isdisjoint(("fpr_with_a", "fpr_gap"))
