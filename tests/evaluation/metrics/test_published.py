import json
import math

import numpy as np
import pytest
from helpers.paths import PARITY
from sklearn.metrics import average_precision_score, f1_score, precision_recall_fscore_support

from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.metrics.published import EVALUATORS, average_precisions, preset
from mlmoe_jax.evaluation.metrics.threshold_search import prior_matched
from mlmoe_jax.models.calibration import probabilities

ARRAYS = np.load(PARITY / "metrics.npz")
RESULTS = json.loads((PARITY / "metrics.json").read_text())["results"]
S, P, Y = (ARRAYS[name] for name in ("S", "P", "Y"))
DIFFICULT = np.select([ARRAYS["T_difficult"] == 1, ARRAYS["T_difficult"] == 0], [1, 2], 0).astype(np.int8)
TABLE = ["CP", "CR", "CF1", "OP", "OR", "OF1"]


def at(suffix):
    return [name + suffix for name in TABLE]


def frequencies(name):
    return np.full(Y.shape[1], 0.3) if name == "mlvpt" else None


# --- the authors' code


@pytest.mark.parametrize(
    "case", ["mlvpt_final", "mlvpt_final_true_ratio", "mlvpt_final_wraparound", "mlvpt_final_ties"]
)
def test_mlvpt_is_the_authors_code(case):
    expected = RESULTS[case]
    scores = P.round(1) if case == "mlvpt_final_ties" else P
    cuts = prior_matched(scores, expected["pos_ratio"], when_zero="all")
    np.testing.assert_array_equal(cuts, expected["thresholds"])
    np.testing.assert_array_equal((scores >= cuts).sum(axis=0), expected["pred_count"])
    row = preset("mlvpt", scores, Y, frequency=expected["pos_ratio"])
    assert list(row) == ["mAP", *TABLE, *at("@top3")]
    compared = expected["prior_matched"]
    if case != "mlvpt_final_ties":  # the order of equal scores is undefined in their code
        compared = compared | {"mAP": expected["mAP_percent"]}
        compared |= {f"{name}@top3": value for name, value in expected["top3"].items()}
    assert {name: 100 * row[name] for name in compared} == pytest.approx(compared, abs=1e-5)


@pytest.mark.parametrize("case", ["mlgcn", "mlgcn_voc_difficult", "mlgcn_class4_no_predictions"])
def test_mlgcn_is_the_authors_code(case):
    expected = RESULTS[case]
    logits = S.astype(np.float64)
    if case == "mlgcn_class4_no_predictions":
        logits[:, 4] -= 100
    codes = DIFFICULT if case == "mlgcn_voc_difficult" else Y
    row = preset("mlgcn", probabilities(logits), codes, frequency=None)
    assert list(row) == ["mAP", *TABLE, *at("@top3_min0.5")]
    assert 100 * row["mAP"] == pytest.approx(expected["mAP_percent"], abs=1e-4)
    of_labels = average_precisions("mlgcn", probabilities(logits), codes)
    np.testing.assert_allclose(100 * of_labels, expected["AP_percent"], rtol=0, atol=1e-4)
    compared = expected["overall"] | {f"{name}@top3_min0.5": value for name, value in expected["top3"].items()}
    assert {name: row[name] for name in compared} == pytest.approx(compared, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "case", "tolerance"), [("mlvpt", "mlvpt_final", 1e-10), ("q2l", "q2l", 1e-4), ("asl", "asl_mAP", 1e-4)]
)
def test_average_precision_is_that_of_the_authors_code(name, case, tolerance):
    of_labels = average_precisions(name, P, Y)
    np.testing.assert_allclose(100 * of_labels, RESULTS[case]["AP_percent"], rtol=0, atol=tolerance)
    found = 100 * preset(name, P, Y, frequency=frequencies(name))["mAP"]
    assert found == pytest.approx(RESULTS[case]["mAP_percent"], abs=1e-6)


# --- by other means


def test_asl_is_sklearn_at_four_fifths():
    scores, labels = P.astype(np.float64), Y.copy()
    scores[:, 2], labels[:, 5] = 0.1, 0  # no prediction, no positive
    scores[3, 0] = 0.8  # not above it
    macro, micro = (
        precision_recall_fscore_support(labels, scores > 0.8, average=average, zero_division=0)
        for average in ("macro", "micro")
    )
    ap = [average_precision_score(labels[:, k], scores[:, k]) if labels[:, k].any() else 0.0 for k in range(12)]
    expected = {
        "mAP": np.mean(ap),
        "CP": macro[0],
        "CR": macro[1],
        "CF1": 2 * macro[0] * macro[1] / (macro[0] + macro[1]),
        "CF1_mean": macro[2],
        "OP": micro[0],
        "OR": micro[1],
        "OF1": micro[2],
    }
    row = preset("asl", scores, labels, frequency=None)
    assert list(row) == list(expected)
    assert row == pytest.approx(expected, abs=1e-12)


def test_drmoe_is_sklearn_at_half():
    row = preset("drmoe", P, Y, frequency=None)
    macro = precision_recall_fscore_support(Y, P >= 0.5, average="macro")
    assert list(row) == ["mAP", "CF1", "CF1_mean", "OF1"]
    assert row["mAP"] == pytest.approx(average_precision_score(Y, P))
    assert row["CF1"] == pytest.approx(2 * macro[0] * macro[1] / (macro[0] + macro[1]))
    assert row["CF1_mean"] == pytest.approx(macro[2])
    assert row["OF1"] == pytest.approx(f1_score(Y, P >= 0.5, average="micro"))


def test_q2l_differs_from_mlgcn_only_in_ap():
    q2l, mlgcn = (preset(name, P, Y, frequency=None) for name in ("q2l", "mlgcn"))
    assert q2l["mAP"] > mlgcn["mAP"] + 1e-3
    assert {**q2l, "mAP": 0} == {**mlgcn, "mAP": 0}


# --- difficult, unknown and empty classes


def test_difficult_labels():
    """ML-GCN leaves them out of AP; otherwise they are negative."""
    negative = np.where(DIFFICULT == 2, 0, DIFFICULT)
    for name in EVALUATORS:
        row, plain = (preset(name, P, codes, frequency=frequencies(name)) for codes in (DIFFICULT, negative))
        assert (row["mAP"] != plain["mAP"]) == (name == "mlgcn")
        assert {**row, "mAP": 0} == {**plain, "mAP": 0}


@pytest.mark.parametrize("name", EVALUATORS)
def test_unknown_labels_are_ignored(name):
    """A row of unknown labels changes nothing; an unknown entry may have any score and is never in the top 3."""
    frequency = frequencies(name)
    expected = preset(name, P, Y, frequency=frequency)
    more = np.vstack([P, np.full(12, 0.9999)]), np.vstack([Y, np.full(12, -1)])
    assert preset(name, *more, frequency=frequency) == expected
    codes = np.where(np.random.default_rng(0).random(Y.shape) < 0.2, -1, Y)
    rows = [preset(name, np.where(codes < 0, x, P), codes, frequency=frequency) for x in (0.0, 1.0)]
    assert rows[0] == rows[1] != expected


def test_classes_without_positives_or_predictions():
    labels, scores = Y.copy(), P.copy()
    labels[:, 5], scores[:, 2] = 0, 0.1
    rows = {name: preset(name, scores, labels, frequency=frequencies(name)) for name in EVALUATORS}
    others = [k for k in range(12) if k != 5]
    ap = multilabel.average_precision(scores, labels)
    assert rows["asl"]["mAP"] == pytest.approx(np.nansum(ap) / 12)
    assert rows["drmoe"]["mAP"] == pytest.approx(np.nanmean(ap))
    assert all(math.isnan(rows[name]["mAP"]) for name in ("mlvpt", "q2l", "mlgcn"))
    cr = multilabel.precision_recall_f1(multilabel.top_k(scores, 3)[:, others], labels[:, others])["CR"]
    assert rows["mlvpt"]["CR@top3"] == pytest.approx(cr)
