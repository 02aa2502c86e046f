import jax
import numpy as np
import pytest
from scipy.special import logit

from mlmoe_jax.models.calibration import Calibration, logits_of, probabilities

KNOTS = [np.array([[0.1, 0.4, 0.41, 0.9], [0.0, 0.2, 0.7, 0.7]]), np.array([[0.5], [0.3]]), np.zeros((2, 1))]
PARTS = {"scale": np.array([0.5, 2.0, 1.0]), "offset": np.array([0.3, -1.0, 0.0])}
ISOTONIC = {"weight": np.array([0.9, 0.5, 0.0]), "knots": KNOTS}
LOGITS = np.linspace(-9, 9, 181).repeat(3).reshape(-1, 3)


def test_the_default_is_the_sigmoid():
    np.testing.assert_array_equal(Calibration()(LOGITS), probabilities(LOGITS))
    assert Calibration()(np.float32([100, -2000])).tolist() == [1, 0]


def test_stored_scores_that_are_rounded_have_finite_logits():
    logits = np.array([-200.0, -50, -3, 0, 9, 30])
    rounded = probabilities(logits).astype(np.float32)
    np.testing.assert_allclose(logits_of(rounded), [-104, -50, -3, 0, 9, 25 * np.log(2)], rtol=1e-4)


def test_scores_follow_the_formula():
    scores = Calibration(**PARTS, **ISOTONIC)(logit(np.array([[0.405, 0.8, 0.2]])))
    linear = probabilities(PARTS["scale"] * logit([0.405, 0.8, 0.2]) + PARTS["offset"])
    np.testing.assert_allclose(scores[0], [0.9 * 0.45 + 0.1 * linear[0], (0.3 + linear[1]) / 2, 0.2], rtol=1e-12)


@pytest.mark.parametrize("more", [{}, ISOTONIC], ids=["linear", "isotonic"])
@pytest.mark.parametrize("middle", [None, [0.3, 1 + 1e-6, 0.0]], ids=["", "operating point"])
def test_a_program_computes_the_same_increasing_function(more, middle):
    calibration = Calibration(**PARTS, **more, middle=None if middle is None else np.array(middle))
    scores = calibration(LOGITS)
    assert (np.diff(scores, axis=0) > 0).all()
    assert scores.min() >= 0
    assert scores.max() <= 1
    np.testing.assert_allclose(jax.jit(calibration)(LOGITS.astype(np.float32)), scores, rtol=0, atol=2e-6)


def test_the_operating_point_is_a_half():
    scores = Calibration(middle=np.array([0.2, 0.9, 1 + 1e-6, 0.0]))(
        logit(np.array([[0.2, 0.45, 1.0, 0.0], [0.6, 0.95, 0.5, 0.5]]))
    )
    np.testing.assert_allclose(scores, [[0.5, 0.25, 0.4999995, 0.5], [0.75, 0.75, 0.25, 0.75]], rtol=1e-6)
    assert scores[0, 2] < 0.5, "a label that is never predicted"
