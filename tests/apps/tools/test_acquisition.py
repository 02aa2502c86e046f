"""Acquisition functions against scipy's distances and entropies."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from mlmoe_jax.apps.tools import acquisition
from mlmoe_jax.apps.tools.acquisition import Candidates, choose_images


def candidates(images: int, labeled: int = 0, width: int = 8, seed: int = 0) -> Candidates:
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(images, width)).astype(np.float32)
    return Candidates(draw.random(images), features, draw.normal(0.2, 0.5, (labeled, width)).astype(np.float32))


def naive(images: Candidates, count: int, weights: np.ndarray) -> tuple[list[int], list[float]]:
    """The greedy choice, from all distances in float64."""
    features, rows, distances = images.features.astype(np.float64), [], []
    for _ in range(count):
        centers = np.concatenate([images.labeled, features[rows]])
        nearest = cdist(centers if len(centers) else features.mean(axis=0, keepdims=True), features).min(axis=0)
        rows.append(max(set(range(len(features))) - set(rows), key=(weights * nearest**2).__getitem__))
        distances.append(nearest[rows[-1]])
    return rows, distances


def test_scores_of_0_and_1_are_certain():
    """Other scores, and the weights of rare labels, are compared by test_select_images.py."""
    assert acquisition.entropy(np.array([[0.0, 1.0]]), np.ones(2)).tolist() == [0.0]


@pytest.mark.parametrize("labeled", [0, 5, 300])
def test_the_chosen_images_are_those_of_the_naive_choice(labeled):
    images = candidates(60, labeled)
    for method, weights in (("diverse", np.ones(60)), ("both", images.uncertainty)):
        rows, distances = choose_images(method, images, 60)
        expected, far = naive(images, 60, weights)
        assert rows.tolist() == expected
        np.testing.assert_allclose(distances, far, rtol=1e-4)


def test_uncertain_images_come_in_order_and_equal_ones_as_given():
    images = Candidates(np.array([0.1, 0.9, 0.5, 0.9]), np.zeros((4, 2), np.float32), np.zeros((0, 2), np.float32))
    rows, distances = choose_images("uncertain", images, 3)
    assert (rows.tolist(), distances) == ([1, 3, 2], None)
