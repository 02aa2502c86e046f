"""Scores and issues of labels, against cleanlab's for the same probabilities (tools/parity/label_quality.py)."""

import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.apps.audit.label_quality import Limits, image_quality, self_confidence
from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, UNKNOWN


@pytest.fixture
def stored():
    return dict(np.load(PARITY / "label_quality.npz"))


def test_scores_and_ranks_are_those_of_cleanlab(stored):
    labels = self_confidence(stored["codes"], stored["scores"])
    images = image_quality(labels)
    np.testing.assert_allclose(labels, stored["labels"], atol=1e-12)
    np.testing.assert_allclose(images, stored["images"], atol=1e-12)
    np.testing.assert_array_equal(np.argsort(labels, axis=None, kind="stable"), stored["label_order"])
    np.testing.assert_array_equal(np.argsort(images, kind="stable"), stored["image_order"])


def test_difficult_labels_do_not_count_and_unknown_ones_count_as_absent(stored):
    codes, scores = stored["codes"][:4, :4].copy(), stored["scores"][:4, :4]
    codes[:, 1], codes[:, 2], codes[3] = DIFFICULT, UNKNOWN, DIFFICULT
    labels = self_confidence(codes, scores)
    assert np.isnan(labels[:, 1]).all()
    np.testing.assert_array_equal(labels[:3, 2], 1 - scores[:3, 2])
    quality = image_quality(labels)
    np.testing.assert_allclose(quality[:3], image_quality(np.delete(labels, 1, axis=1))[:3])
    assert np.isnan(quality[3])


def test_limits_and_issues_are_those_of_cleanlab(stored):
    codes, scores = stored["codes"], stored["scores"]
    limits = Limits.of(codes, scores)
    np.testing.assert_allclose(np.stack([1 - limits.absent, limits.present], axis=1), stored["thresholds"], atol=1e-12)
    assert limits.found.all()
    issues = limits.issues(codes, scores)
    np.testing.assert_array_equal(issues, stored["issues"])
    assert 0 < issues[codes == 1].sum() < issues.sum()


def test_limits_are_of_known_labels_and_unknown_ones_can_be_missing(stored):
    codes, scores = stored["codes"].copy(), stored["scores"]
    codes[codes[:, 0] == NEGATIVE, 0] = UNKNOWN
    codes[:, 1] = DIFFICULT
    limits = Limits.of(codes, scores)
    assert limits.present[0] == scores[codes[:, 0] == 1, 0].mean()
    assert np.isnan([limits.absent[0], *(limit[1] for limit in limits)]).all()
    assert not limits.found[:2].any()
    issues = limits.issues(codes, scores)
    assert issues[codes[:, 0] == UNKNOWN, 0].any()
    assert not issues[codes == DIFFICULT].any()


def test_a_fit_finds_a_label_by_the_gap_of_its_limits():
    assert Limits(np.array([0.1, 0.1, 0.6]), np.array([0.31, 0.29, 0.95])).found.tolist() == [True, False, True]


def test_an_issue_needs_the_opposite_value_to_be_more_probable():
    """For frequent labels the mean of the images without it is above a half, for rare ones that with it below."""
    limits = Limits(np.array([0.6, 0.05]), np.array([0.95, 0.4]))
    codes, scores = np.array([[1, 0], [1, 0]]), np.array([[0.55, 0.45], [0.45, 0.55]])
    assert limits.issues(codes, scores).tolist() == [[False, False], [True, True]]
