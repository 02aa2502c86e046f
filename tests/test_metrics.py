import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve, precision_score, recall_score

from mlmoe_jax import metrics, thresholds

PARITY = Path(__file__).parent / "parity"
ARRAYS = np.load(PARITY / "metrics.npz")
RESULTS = json.loads((PARITY / "metrics.json").read_text())["results"]
S, P, Y, DIFFICULT = (ARRAYS[name] for name in ("S", "P", "Y", "T_difficult"))
KINDS = ("none", "envelope", "11point")


def hard_case(seed=0, images=60, classes=9):
    """Scores with many ties, a fifth of the entries masked, a class without positives and one with nothing else."""
    random = np.random.default_rng(seed)
    labels = (random.random((images, classes)) < 0.3).astype(np.float32)
    scores = (random.normal(size=labels.shape) + labels).round(1).astype(np.float32)
    mask = (random.random(labels.shape) < 0.8).astype(np.float32)
    labels[:, 2], labels[:, 5] = 0, 1
    return scores, labels, mask


def percents(figures, names):
    return {name: 100 * figures[name] for name in names}


# --- the authors' code


@pytest.mark.parametrize(("case", "kind"), [("mlgcn", "none"), ("asl_mAP", "none"), ("q2l", "envelope")])
def test_average_precision_of_the_authors_code(case, kind):
    ap = metrics.average_precision(S, Y, interpolation=kind)
    np.testing.assert_allclose(100 * ap, RESULTS[case]["AP_percent"], rtol=0, atol=1e-4)
    assert 100 * metrics.mean_average_precision(ap) == pytest.approx(RESULTS[case]["mAP_percent"], abs=1e-4)


def test_average_precision_of_mlvpt():
    ap = metrics.average_precision(P, Y, interpolation="envelope")
    np.testing.assert_allclose(ap, RESULTS["mlvpt_epoch_mAP"]["AP_fraction"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(100 * ap, RESULTS["mlvpt_final"]["AP_percent"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["mlgcn", "mlgcn_voc_difficult", "mlgcn_class4_no_predictions"])
def test_figures_of_mlgcn(case):
    """Difficult labels are left out of AP and negative in all else; top-k also asks for logit ≥ 0."""
    target = DIFFICULT if case == "mlgcn_voc_difficult" else Y
    ap = metrics.average_precision(S, target, mask=target != 0 if target is DIFFICULT else None)
    np.testing.assert_allclose(100 * ap, RESULTS[case]["AP_percent"], rtol=0, atol=1e-4)
    scores = S.copy()
    if case == "mlgcn_class4_no_predictions":
        scores[:, 4] -= 100
    chosen = {"overall": scores >= 0} | {f"top{k}": metrics.top_k(scores, k, minimum=0) for k in (1, 3)}
    for name, predicted in chosen.items():
        figures = metrics.precision_recall_f1(predicted, target, empty="one")
        assert {key: figures[key] for key in RESULTS[case][name]} == pytest.approx(RESULTS[case][name], abs=1e-12)


@pytest.mark.parametrize("threshold", RESULTS["mlvpt_fixed_thresholds"])
def test_fixed_thresholds_of_mlvpt(threshold):
    expected = {key: math.nan if x is None else x for key, x in RESULTS["mlvpt_fixed_thresholds"][threshold].items()}
    figures = metrics.precision_recall_f1(np.greater(P, float(threshold)), Y)
    assert {key: figures[key] for key in expected} == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_top_three_of_mlvpt():
    expected = RESULTS["mlvpt_final"]["top3"]
    figures = metrics.precision_recall_f1(metrics.top_k(P, 3), Y)
    assert percents(figures, expected) == pytest.approx(expected, abs=1e-10)


# --- scikit-learn


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_that_of_sklearn(seed):
    scores, labels, mask = hard_case(seed)
    ap = {kind: metrics.average_precision(scores, labels, mask=mask, interpolation=kind) for kind in KINDS}
    for k in range(labels.shape[1]):
        y, s = labels[mask[:, k] > 0, k], scores[mask[:, k] > 0, k]
        if not y.any():
            assert k == 2
            assert all(math.isnan(values[k]) for values in ap.values())
            continue
        precision, recall, _ = precision_recall_curve(y, s)  # recall falls; the last point is (0, 1) by convention
        envelope = np.maximum.accumulate(precision)[:-1]
        reached = [precision[:-1][recall[:-1] >= level / 10 - 1e-9].max() for level in range(11)]
        assert ap["none"][k] == pytest.approx(average_precision_score(y, s), abs=1e-12)
        assert ap["envelope"][k] == pytest.approx(-np.diff(recall) @ envelope, abs=1e-12)
        assert ap["11point"][k] == pytest.approx(np.mean(reached), abs=1e-12)


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
    figures = metrics.precision_recall_f1(predicted, labels, empty=empty)
    assert {key: figures[key] for key in expected} == pytest.approx(expected, abs=1e-12)
    cp, cr = figures["CP"], figures["CR"]
    assert figures["CF1"] == pytest.approx(2 * cp * cr / (cp + cr))
    assert figures["CF1"] != pytest.approx(figures["CF1_mean"], abs=1e-3)


# --- by hand


def test_average_precision_by_hand():
    scores, labels = np.array([[0.9], [0.8], [0.7], [0.6], [0.5]]), np.array([[1], [0], [0], [1], [1]])
    ap = {kind: metrics.average_precision(scores, labels, interpolation=kind)[0] for kind in KINDS}
    assert ap["none"] == pytest.approx((1 + 2 / 4 + 3 / 5) / 3)
    assert ap["envelope"] == pytest.approx((1 + 3 / 5 + 3 / 5) / 3)
    # Recall 1/3 is reached by 0 … 0.3 with precision 1, the other seven points by 3/5.
    assert ap["11point"] == pytest.approx((4 * 1 + 7 * 3 / 5) / 11)


def test_ties_enter_together():
    """Three of equal score, one positive: precision 1/3; then the last positive: 2/4, which lifts the envelope."""
    scores, labels = np.array([[0.5], [0.5], [0.5], [0.1]]), np.array([[0], [1], [0], [1]])
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 0, 1]):
        s, y = scores[order], labels[order]
        assert metrics.average_precision(s, y)[0] == pytest.approx((1 / 3 + 1 / 2) / 2)
        assert metrics.average_precision(s, y, interpolation="envelope")[0] == pytest.approx(1 / 2)


def test_eleven_point_recalls_are_exact():
    """The third of ten positives reaches recall 0.3, which 0.1 · 3 = 0.30000000000000004 would miss."""
    labels = np.array([1, 1, 1] + [0] * 90 + [1] * 7)[:, None]
    scores = -np.arange(100.0)[:, None]
    tail = 10 / 100
    ap = metrics.average_precision(scores, labels, interpolation="11point")[0]
    assert ap == pytest.approx((4 * 1 + 7 * tail) / 11)


def test_mean_average_precision_skips_empty_classes():
    assert metrics.mean_average_precision([0.2, np.nan, 0.6]) == pytest.approx(0.4)
    assert math.isnan(metrics.mean_average_precision([np.nan, np.nan]))


def test_precision_and_recall_by_hand():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]])
    predicted = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    counts = dict(OP=2 / 4, OR=2 / 4, OF1=0.5)
    expected = {
        "skip": dict(CP=(2 / 3 + 0) / 2, CR=(1 + 0) / 2, CF1=0.4, CF1_mean=(0.8 + 0) / 2, **counts),
        "zero": dict(CP=2 / 9, CR=1 / 3, CF1=4 / 15, CF1_mean=0.8 / 3, **counts),
        "one": dict(CP=2 / 9, CR=1 / 2, CF1=4 / 13, CF1_mean=0.8 / 3, OP=2 / 5, OR=2 / 4, OF1=4 / 9),
    }
    for empty, figures in expected.items():
        assert metrics.precision_recall_f1(predicted, labels, empty=empty) == pytest.approx(figures)


def test_figures_where_nothing_is_predicted_or_right():
    labels, nothing = np.eye(2), np.zeros((2, 2))
    skip, zero = (metrics.precision_recall_f1(nothing, labels, empty=empty) for empty in ("skip", "zero"))
    assert [key for key, value in skip.items() if math.isnan(value)] == ["CP", "CF1", "OP", "OF1"]
    assert set(zero.values()) == {0.0}
    assert set(metrics.precision_recall_f1(1 - labels, labels).values()) == {0.0}


def test_top_k():
    scores = np.array([[0.1, 0.7, 0.7, 0.2], [0.4, 0.4, 0.4, 0.4]])
    assert metrics.top_k(scores, 1).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert metrics.top_k(scores, 3).tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]
    assert metrics.top_k(scores, 3, minimum=0.4).tolist() == [[0, 1, 1, 0], [1, 1, 1, 0]]
    assert metrics.top_k(scores, 9).all()
    with pytest.raises(ValueError, match="at least 1"):
        metrics.top_k(scores, 0)


def test_map_at_k():
    scores = np.array([[0.9, 0.8], [0.3, 0.4], [0.6, 0.5], [0.1, 0.2]])
    labels = np.array([[1, 1], [1, 0], [0, 1], [0, 0]])
    # Of class 0 images 0 and 2 return it (ranks 1, 2), of class 1 images 1 and 3.
    assert metrics.map_at_k(scores, labels, 1) == pytest.approx(((1 + 0) / 2 + (0 + 0) / 2) / 2)
    assert metrics.map_at_k(scores, labels, 2) == pytest.approx((5 / 6 + 1) / 2)
    assert math.isnan(metrics.map_at_k(scores, np.zeros((4, 2)), 1))
    hard = hard_case()
    plain = metrics.mean_average_precision(metrics.average_precision(*hard[:2], mask=hard[2]))
    assert metrics.map_at_k(*hard[:2], 9, mask=hard[2]) == pytest.approx(plain)
    assert metrics.map_at_k(*hard[:2], 3, mask=hard[2]) < plain


def test_evaluate_scores_names_every_figure():
    scores, labels, mask = hard_case()
    scores = 1 / (1 + np.exp(-scores))
    cuts = thresholds.reported(scores, labels.mean(axis=0))
    report = metrics.evaluate_scores(scores, labels, mask, cuts)
    parts = ("CP", "CR", "CF1", "CF1_mean", "OP", "OR", "OF1")
    names = [f"{part}@{name}" for name in ("0.5", "prior_matched_transductive") for part in parts]
    assert list(report) == ["mAP", "mAP_envelope", "precision@1", *names]
    assert all(type(value) is float for value in report.values())
    ap = metrics.average_precision(scores, labels, mask=mask)
    assert report["mAP"] == np.nanmean(ap)
    assert report["mAP_envelope"] > report["mAP"]
    for name, cut in cuts.items():
        figures = metrics.precision_recall_f1(scores >= cut, labels, mask=mask)
        assert {part: report[f"{part}@{name}"] for part in parts} == figures


def test_precision_at_one():
    """Image 0: right. 1: its highest class is masked, the next is right. 2: wrong. 3: no positive. 4: padding."""
    scores = np.array([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.4, 0.3], [0.9, 0.1]])
    labels = np.array([[1, 0], [0, 1], [0, 1], [0, 0], [1, 0]])
    mask = np.array([[1, 1], [0, 1], [1, 1], [1, 1], [0, 0]])
    assert metrics.evaluate_scores(scores, labels, mask, {})["precision@1"] == pytest.approx(2 / 4)


# --- invariants


def everything(scores, labels, mask):
    curves = [metrics.average_precision(scores, labels, mask=mask, interpolation=kind) for kind in KINDS]
    predicted = metrics.top_k(scores, 3)
    figures = [list(metrics.precision_recall_f1(predicted, labels, mask=mask).values())]
    return np.concatenate([*curves, *figures])


@pytest.mark.parametrize("seed", range(3))
def test_order_of_images_does_not_matter(seed):
    case = hard_case(seed)
    order = np.random.default_rng(seed).permutation(len(case[0]))
    np.testing.assert_allclose(everything(*(x[order] for x in case)), everything(*case), rtol=1e-13)


def test_only_the_order_of_scores_matters():
    scores, labels, mask = hard_case()
    np.testing.assert_array_equal(
        everything(np.exp(scores.astype(np.float64)) - 3, labels, mask), everything(scores, labels, mask)
    )


@pytest.mark.parametrize("anything", [-99.0, 99.0, np.inf, -np.inf, np.nan])
def test_masked_entries_may_hold_anything(anything):
    scores, labels, mask = hard_case()
    spoilt = np.where(mask > 0, scores, anything), np.where(mask > 0, labels, 1 - labels)
    for kind in KINDS:
        expected = metrics.average_precision(scores, labels, mask=mask, interpolation=kind)
        np.testing.assert_array_equal(
            metrics.average_precision(*spoilt, mask=mask, interpolation=kind), expected, err_msg=kind
        )
    cuts = {"0.5": 0.5}
    assert metrics.evaluate_scores(*spoilt, mask, cuts) == metrics.evaluate_scores(scores, labels, mask, cuts)
    assert metrics.map_at_k(*spoilt, 2, mask=mask) == metrics.map_at_k(scores, labels, 2, mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_by_masked_images_changes_nothing(kind):
    scores, labels, mask = hard_case()
    scores[3] = -np.inf  # ties with whatever the padding is ranked as
    padded = [np.concatenate([x, np.full((7, x.shape[1]), fill)]) for x, fill in ((scores, 9), (labels, 1), (mask, 0))]
    np.testing.assert_array_equal(
        metrics.average_precision(*padded[:2], mask=padded[2], interpolation=kind),
        metrics.average_precision(scores, labels, mask=mask, interpolation=kind),
    )


@pytest.mark.parametrize("seed", range(5))
def test_envelope_is_never_below_plain(seed):
    scores, labels, mask = hard_case(seed)
    plain, envelope = (
        metrics.average_precision(scores, labels, mask=mask, interpolation=kind) for kind in ("none", "envelope")
    )
    assert np.all(envelope >= plain, where=~np.isnan(plain))
    assert np.any(envelope > plain + 1e-3)


def test_only_ones_are_positive():
    labels = np.where(Y == 1, 1, np.array([-1, 0, 2, 0])[np.arange(12) % 4])
    np.testing.assert_array_equal(metrics.average_precision(S, labels), metrics.average_precision(S, Y))
    np.testing.assert_array_equal(metrics.average_precision(S, Y == 1), metrics.average_precision(S, Y))


def test_mistakes_of_the_caller():
    with pytest.raises(ValueError, match="NaN"):
        metrics.average_precision(np.full((2, 2), np.nan), np.eye(2))
    with pytest.raises(ValueError, match=r"\[B,K\]"):
        metrics.average_precision(np.eye(2), np.eye(2), mask=np.ones(2))
    with pytest.raises(ValueError, match="interpolation"):
        metrics.average_precision(np.eye(2), np.eye(2), interpolation="voc")
    with pytest.raises(ValueError, match="empty"):
        metrics.precision_recall_f1(np.eye(2), np.eye(2), empty="nan")
