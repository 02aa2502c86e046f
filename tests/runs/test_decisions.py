"""The thresholds and the calibration of a run, as a prediction uses them."""

import numpy as np
import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.runs.decisions import Thresholds

VALUES = {"a": 0.1, "b": 0.2}
FIT = {"split": "val", "goal": "f1"}


def calibration(scale: float = 2.0, offset: float = 0.5) -> dict:
    return {"split": "val", "labels": {name: {"scale": scale, "offset": offset} for name in "ab"}}


def used(thresholds: Thresholds, *, calibrated: bool, replaced: bool = False) -> Thresholds:
    config = default_config()
    config.eval.threshold, config.calibration.use = 0.3, calibrated
    return thresholds.used(config, "ab", replaced=replaced)


def test_a_label_is_predicted_from_its_threshold_on():
    limits = Thresholds(dict(zip("abc", (0.5, 0.3, np.inf), strict=True)))
    below = np.nextafter([0.5, 0.3, 1], 0)
    assert limits.predict(np.array([[0.5, 0.3, 1], below]), "abc").tolist() == [[True, True, False], [False] * 3]
    tree = LabelTree(((0, 1),))  # a implies b
    assert limits.predict(np.array([[0.5, 0.1, 0]]), "abc", tree).tolist() == [[True, True, False]]


def test_thresholds_fitted_to_corrected_scores_are_not_compared_with_raw_ones(capsys):
    fitted, given = Thresholds(VALUES, FIT, calibration()), Thresholds(VALUES, {}, calibration())
    assert used(fitted, calibrated=True) == fitted
    assert used(given, calibrated=True) == given
    assert used(given, calibrated=False) == Thresholds(VALUES)
    assert not capsys.readouterr().err
    assert used(fitted, calibrated=False) == Thresholds.fixed("ab", 0.3)
    assert "raw scores get the threshold 0.3" in capsys.readouterr().err
    assert used(Thresholds(VALUES, FIT), calibrated=False) == Thresholds(VALUES, FIT)


def test_a_given_threshold_is_compared_with_corrected_scores():
    fitted = Thresholds(VALUES, FIT, calibration())
    assert used(fitted, calibrated=True, replaced=True) == Thresholds.fixed("ab", 0.3, calibration())
    assert used(fitted, calibrated=False, replaced=True) == Thresholds.fixed("ab", 0.3)


@pytest.mark.parametrize(("scale", "offset"), [(0.0, 0.5), (-1.0, 0.5), (np.inf, 0.5), (np.nan, 0.5), (1.0, np.nan)])
def test_a_calibration_increases(scale, offset):
    with pytest.raises(ValueError, match="does not increase"):
        Thresholds(VALUES, FIT, calibration(scale, offset)).correction("ab")
