"""Scores of labels and images, against cleanlab's for the same probabilities (tools/parity/label_quality.py)."""

import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.apps.audit.label_quality import image_quality, self_confidence
from mlmoe_jax.data.label_codes import DIFFICULT, UNKNOWN


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
