import json
from pathlib import Path

import numpy as np
import pytest

from mlmoe_jax import thresholds
from mlmoe_jax.metrics import precision_recall_f1

PARITY = Path(__file__).parent / "parity"
ARRAYS = np.load(PARITY / "metrics.npz")
RESULTS = json.loads((PARITY / "metrics.json").read_text())["results"]


@pytest.mark.parametrize(
    "case", ["mlvpt_final", "mlvpt_final_true_ratio", "mlvpt_final_wraparound", "mlvpt_final_ties"]
)
def test_cuts_and_figures_of_the_authors_code(case):
    expected = RESULTS[case]
    scores = ARRAYS["P"].round(1) if case == "mlvpt_final_ties" else ARRAYS["P"]
    cuts = thresholds.prior_matched(scores, expected["pos_ratio"], when_zero="all")
    np.testing.assert_array_equal(cuts, expected["thresholds"])
    predicted = scores >= cuts
    np.testing.assert_array_equal(predicted.sum(axis=0), expected["pred_count"])
    figures = precision_recall_f1(predicted, ARRAYS["Y"])
    percent = {name: 100 * figures[name] for name in expected["prior_matched"]}
    assert percent == pytest.approx(expected["prior_matched"], abs=1e-4)


def test_by_hand():
    scores = np.array([[0.9, 0.1], [0.5, 0.2], [0.4, 0.3], [0.1, 0.4]])
    np.testing.assert_array_equal(thresholds.prior_matched(scores, [0.5, 1.0]), [0.5, 0.1])
    np.testing.assert_array_equal(thresholds.prior_matched(scores, [0.74, 0.25]), [0.5, 0.4])


def test_a_class_too_rare_for_one_prediction():
    scores, frequency = np.array([[0.9, 0.1], [0.5, 0.2]]), [0.4, 0.5]
    np.testing.assert_array_equal(thresholds.prior_matched(scores, frequency), [np.inf, 0.2])
    np.testing.assert_array_equal(thresholds.prior_matched(scores, frequency, when_zero="all"), [0.5, 0.2])


def test_reported_cuts():
    scores = np.array([[0.9, 0.1], [0.5, 0.2]])
    assert thresholds.reported(scores) == {"0.5": 0.5}
    assert thresholds.reported(scores, threshold=0.80) == {"0.8": 0.8}
    cuts = thresholds.reported(scores, [0.5, 1.0])
    assert list(cuts) == ["0.5", "prior_matched_transductive"]
    np.testing.assert_array_equal(cuts["prior_matched_transductive"], [0.9, 0.1])


@pytest.mark.parametrize(
    ("scores", "frequency", "when_zero"),
    [
        (np.ones((3, 2)), [0.5, 0.5, 0.5], "none"),
        (np.ones((0, 2)), [0.5, 0.5], "none"),
        (np.full((3, 2), np.nan), [0.5, 0.5], "none"),
        (np.ones((3, 2)), [0.5, 1.5], "none"),
        (np.ones((3, 2)), [0.5, np.nan], "none"),
        (np.ones((3, 2)), [0.5, 0.5], "wrap"),
    ],
)
def test_impossible_input(scores, frequency, when_zero):
    with pytest.raises(ValueError, match="must be"):
        thresholds.prior_matched(scores, frequency, when_zero=when_zero)
