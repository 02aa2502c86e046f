"""`python -m benchmarks.measure label_selection`: its functions and its simulation, on drawn features."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.measure import label_selection
from benchmarks.measure.label_selection import FUNCTIONS, Images, Round, labels_to
from mlmoe_jax.apps.tools.acquisition import entropy, normalize, rarity


@pytest.fixture
def images():
    """60 images with two labels that their features determine."""
    features = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    return Images(features, (features[:, :2] > 0.3).astype(np.int8))


@pytest.fixture
def one(images):
    draw = np.random.default_rng(1)
    scores = draw.random((60, 2))
    return Round(
        scores.mean(axis=1), normalize(images.features), normalize(images.features[:5]), scores, np.array([3, 30]), draw
    )


def test_every_function_chooses_different_images(one):
    for name, function in FUNCTIONS.items():
        rows = function(one, 10)
        assert len(set(rows.tolist())) == 10, name
        assert rows.max() < 60, name


def test_the_distances_of_badge_are_those_of_the_gradients(one):
    errors = one.scores - (one.scores >= 0.5)
    gradients = (errors[:, :, None] * one.features[:, None]).reshape(60, -1)
    chosen = [int(np.linalg.norm(gradients, axis=1).argmax())]
    for _ in range(9):
        gaps = np.linalg.norm(gradients[:, None] - gradients[chosen], axis=2).min(axis=1)
        chosen.append(int(gaps.argmax()))
    assert label_selection.badge(one, 10, sampled=False).tolist() == chosen


@pytest.mark.parametrize(
    ("name", "rows"),
    [("uncertain", [1, 2, 0]), ("expected rare positives", [1, 0, 2]), ("entropy, all labels equal", [2, 0, 1])],
)
def test_rare_labels_count_more_where_a_function_says_so(one, name, rows):
    scores = np.array([[0.0, 0.6], [0.3, 0.0], [0.0, 0.5]])
    rare = replace(one, scores=scores, uncertainty=entropy(scores, rarity(one.positives)))
    assert FUNCTIONS[name](rare, 3).tolist() == rows


def test_a_simulation_labels_half_of_the_pool(images, monkeypatch):
    monkeypatch.setattr(label_selection, "ROUND", 8)
    sizes = []
    monkeypatch.setattr(
        label_selection, "fit", lambda known, penalty: (sizes.append(len(known.codes)), np.eye(6)[:, :2], 0)[1:]
    )
    options = {"seed": 0, "penalty": 0.1}
    curve = label_selection.simulate(FUNCTIONS["both"], images, images, np.array([0, 1]), **options)
    assert sizes == label_selection.rounds(30).tolist() == [8, 16, 24, 30]
    assert curve == [1.0] * 4, "the first two features rank the images of the labels"


def test_both_fits_have_the_coefficients_of_their_penalty(images):
    kernel, bias = label_selection.fit(images, 0.1)
    margins = images.features @ kernel + bias
    residual = 0.1 * images.features.T @ (images.codes - 1 / (1 + np.exp(-margins)))
    np.testing.assert_allclose(kernel, residual, atol=1e-3)


def test_a_part_measures_on_images_outside_of_its_pool(images):
    pool, measured = label_selection.parts_of("tuning", images, images, 3)
    assert (len(pool.codes), len(measured.codes)) == (48, 12)
    every = np.concatenate([pool.features, measured.features])
    assert sorted(every[:, 0].tolist()) == sorted(images.features[:, 0].tolist())


def test_the_labels_to_a_target_are_interpolated():
    labels = np.array([100, 200, 250])
    assert labels_to(0.5, np.array([0.2, 0.6, 0.4]), labels) == pytest.approx(175)
    assert labels_to(0.1, np.array([0.2, 0.6, 0.4]), labels) == 100
    assert np.isnan(labels_to(0.7, np.array([0.2, 0.6, 0.4]), labels))
