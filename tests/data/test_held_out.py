"""The images that are held out for validation."""

import numpy as np
import pytest

from mlmoe_jax.data.label_codes import few_positives
from mlmoe_jax.data.stratified_split import draw_stratified


def long_tail(images: int = 400, labels: int = 30, seed: int = 0) -> np.ndarray:
    """Codes of labels whose frequency falls from 1/3 to 2 images, with some unknown and difficult ones."""
    draw = np.random.default_rng(seed)
    codes = (draw.random((images, labels)) < np.geomspace(1 / 3, 1 / images, labels)).astype(np.int8)
    codes[draw.random(codes.shape) < 0.02] = -1
    codes[draw.random(codes.shape) < 0.02] = 2
    for label in range(labels):  # every label has two images
        codes[draw.choice(images, 2, replace=False), label] = 1
    return codes


def draw_random(codes: np.ndarray, count: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).permutation(len(codes))[:count]


@pytest.mark.parametrize("count", [1, 40, 399])
def test_the_rows_are_as_many_as_asked_for_and_follow_the_seed(count):
    codes = long_tail()
    rows = draw_stratified(codes, count, 3)
    assert len(rows) == len(set(rows.tolist())) == count
    assert (np.diff(rows) > 0).all()
    assert 0 <= rows[0] <= rows[-1] < len(codes)
    np.testing.assert_array_equal(rows, draw_stratified(codes, count, 3))
    if count == 40:
        assert rows.tolist() != draw_stratified(codes, count, 4).tolist()


def test_every_label_with_two_images_is_in_both_parts():
    for seed in range(5):
        positive = long_tail(seed=seed) == 1
        rows = draw_stratified(positive.astype(np.int8), 60, seed)
        held_out, rest = positive[rows].sum(axis=0), np.delete(positive, rows, axis=0).sum(axis=0)
        assert held_out.min() >= 1
        assert rest.min() >= 1
    missing = [(positive[draw_random(positive, 60, seed)].sum(axis=0) == 0).sum() for seed in range(5)]
    assert min(missing) > 0, "otherwise the case is too easy"


def test_shares_of_labels_are_kept():
    positive = long_tail(2000, 20) == 1
    frequent = positive.sum(axis=0) >= 20

    def error(rows):
        return np.abs(positive[rows].mean(axis=0) / positive.mean(axis=0) - 1)[frequent]

    stratified = np.array([error(draw_stratified(positive, 200, seed)) for seed in range(5)])
    at_random = np.array([error(draw_random(positive, 200, seed)) for seed in range(5)])
    assert stratified.max() < 0.3
    assert stratified.mean() < at_random.mean() / 4


def test_the_paper_s_rule_on_a_case_by_hand():
    """Label b (2 images) comes first and is split; then a (6 images) lacks 3 − 1 in each part."""
    codes = np.array([[1, 1], [1, 1], [1, 0], [1, 0], [1, 0], [1, 0], [0, 0], [0, 0]], np.int8)
    for seed in range(4):
        rows = draw_stratified(codes, 4, seed)
        assert codes[rows].sum(axis=0).tolist() == [3, 1]
        assert (codes[rows].sum(axis=1) == 0).sum() == 1


def test_a_label_of_one_image_stays_in_the_training_part():
    codes = np.zeros((10, 2), np.int8)
    codes[4, 0], codes[:, 1] = 1, 1
    assert all(4 not in draw_stratified(codes, 3, seed) for seed in range(5))


def test_images_without_labels_fill_the_parts():
    assert len(draw_stratified(np.zeros((10, 3), np.int8), 4, 0)) == 4
    assert len(draw_stratified(np.zeros((10, 0), np.int8), 4, 0)) == 4


@pytest.mark.parametrize(
    ("positives", "says"),
    [
        ((10, 10, 0), ""),
        ((9, 9, 40), "a median of 9 positives per label"),
        ((1, 0, 1), "a median of 1 positives per label"),
        ((), ""),
    ],
)
def test_few_positives_of_the_held_out_images_are_said(positives, says):
    labels = np.arange(40)[:, None] < np.array(positives, int)
    assert few_positives(np.where(labels, 1, -1).astype(np.int8)) == says
