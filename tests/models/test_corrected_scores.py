import jax
import numpy as np

from mlmoe_jax.models.calibration import Calibration, probabilities
from mlmoe_jax.runs.decisions import to_logits

PARTS = {"scale": np.array([0.5, 2.0, 1.0]), "offset": np.array([0.3, -1.0, 0.0])}
LOGITS = np.linspace(-9, 9, 181).repeat(3).reshape(-1, 3)


def test_the_default_is_the_sigmoid():
    np.testing.assert_array_equal(Calibration()(LOGITS), probabilities(LOGITS))
    assert Calibration()(np.float32([100, -2000])).tolist() == [1, 0]


def test_stored_scores_that_are_rounded_have_finite_logits():
    logits = np.array([-200.0, -50, -3, 0, 9, 30])
    rounded = probabilities(logits).astype(np.float32)
    np.testing.assert_allclose(to_logits(rounded), [-104, -50, -3, 0, 9, 25 * np.log(2)], rtol=1e-4)


def test_scores_follow_the_formula():
    logits = np.array([[-0.4, 1.4, -1.4]])
    expected = 1 / (1 + np.exp(-(PARTS["scale"] * logits + PARTS["offset"])))
    np.testing.assert_allclose(Calibration(**PARTS)(logits), expected, rtol=1e-12)


def test_a_program_computes_the_same_increasing_function():
    calibration = Calibration(**PARTS)
    scores = calibration(LOGITS)
    assert (np.diff(scores, axis=0) > 0).all()
    assert scores.min() >= 0
    assert scores.max() <= 1
    np.testing.assert_allclose(jax.jit(calibration)(LOGITS.astype(np.float32)), scores, rtol=0, atol=2e-6)
