"""`python -m benchmarks.measure label_selection`: its functions and its simulation, on drawn features."""

import numpy as np
import pytest

from benchmarks.measure import label_selection
from benchmarks.measure.label_selection import FUNCTIONS, Images, labels_to


@pytest.fixture
def images():
    """60 images with two labels that their features determine."""
    features = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    return Images(features, (features[:, :2] > 0.3).astype(np.int8))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_simulation_labels_half_of_the_pool_without_an_image_twice(function, images, monkeypatch):
    monkeypatch.setattr(label_selection, "ROUND", 8)
    sizes = []
    monkeypatch.setattr(
        label_selection, "fit", lambda known, penalty: (sizes.append(len(known.codes)), np.eye(6)[:, :2], 0)[1:]
    )
    options = {"seed": 0, "penalty": 0.1}
    curve = label_selection.simulate(function, images, images, np.array([0, 1]), **options)
    assert sizes == label_selection.rounds(30).tolist() == [8, 16, 24, 30]
    assert curve == [1.0] * 4, "the first two features rank the images of the labels"


def test_both_fits_have_the_coefficients_of_their_penalty(images):
    kernel, bias = label_selection.fit(images, 0.1)
    margins = images.features @ kernel + bias
    residual = 0.1 * images.features.T @ (images.codes - 1 / (1 + np.exp(-margins)))
    np.testing.assert_allclose(kernel, residual, atol=1e-3)


def test_the_labels_to_a_target_are_interpolated():
    labels = np.array([100, 200, 250])
    assert labels_to(0.5, np.array([0.2, 0.6, 0.4]), labels) == pytest.approx(175)
    assert labels_to(0.1, np.array([0.2, 0.6, 0.4]), labels) == 100
    assert np.isnan(labels_to(0.7, np.array([0.2, 0.6, 0.4]), labels))
