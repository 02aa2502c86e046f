"""The softmax within attributes: logits, their loss, calibration and assignment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from mlmoe_jax.config import default_config
from mlmoe_jax.data.label_tree import Attribute, LabelTree
from mlmoe_jax.evaluation.decisions.calibration_fit import fit_all
from mlmoe_jax.models.apply import average_logits
from mlmoe_jax.models.attributes import AttributeSoftmax, assign
from mlmoe_jax.models.calibration import Calibration, probabilities
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.training.objective import Objective, training_labels

COLOR, SIZE = Attribute("color", (0, 3, 5)), Attribute("size", (1, 2))
SOFTMAX = AttributeSoftmax.of((COLOR, SIZE), 7)
VALUES, TAGS = [list(COLOR.labels), list(SIZE.labels)], [4, 6]
drawn = np.random.default_rng(0).normal


@pytest.mark.parametrize("scale", [1, 30, 1e3, 1e5])
def test_probabilities_are_the_softmax(scale):
    scores = (scale * drawn(size=(500, 7))).astype(np.float32)
    logits = np.asarray(jax.jit(SOFTMAX)(scores))
    assert np.isfinite(logits).all()
    for labels in VALUES:
        expected = softmax(scores[:, labels].astype(np.float64), axis=1)
        np.testing.assert_allclose(probabilities(logits)[:, labels], expected, atol=1e-6)
        np.testing.assert_allclose(probabilities(SOFTMAX(scores))[:, labels], expected, atol=1e-6)
    np.testing.assert_array_equal(logits[:, TAGS], scores[:, TAGS])


@pytest.mark.parametrize("scores", [np.zeros((1, 7)), 3 * drawn(size=(1, 7)), 300 * drawn(size=(1, 7))])
def test_the_gradient_is_that_of_the_cross_entropy(scores):
    gradient = jax.grad(lambda z: -jax.nn.log_sigmoid(SOFTMAX(z))[0, 3])(jnp.asarray(scores, jnp.float32))
    expected = np.zeros(7)
    expected[VALUES[0]] = softmax(scores[0, VALUES[0]]) - [0, 1, 0]
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)


def test_the_mean_of_flips_and_a_temperature_are_before_the_softmax():
    first, second = drawn(size=(2, 9, 7))
    mean = average_logits(Prediction(SOFTMAX(first)), Prediction(SOFTMAX(second)), SOFTMAX).logits
    np.testing.assert_allclose(mean, SOFTMAX((first + second) / 2), atol=1e-6)
    scale = np.array([2, 1, 1, 2, 3, 2, 1.0])
    found = Calibration(scale, 0.0, softmax=SOFTMAX)(SOFTMAX(first))
    np.testing.assert_allclose(found[:, VALUES[0]], softmax(2 * first[:, VALUES[0]], axis=1), atol=1e-9)
    np.testing.assert_allclose(found[:, 4], probabilities(3 * first[:, 4]))


def test_each_attribute_has_its_temperature():
    scores = drawn(size=(4000, 7)) * 3
    draw = np.random.default_rng(1)
    present = np.zeros(scores.shape, bool)
    for labels, temperature in zip(VALUES, (2.0, 0.5), strict=True):
        value = (softmax(scores[:, labels] / temperature, axis=1).cumsum(1) > draw.uniform(size=(4000, 1))).argmax(1)
        present[np.arange(4000), np.array(labels)[value]] = True
    fit = fit_all(SOFTMAX(scores), present, np.ones_like(present), (COLOR, SIZE), method="platt")
    np.testing.assert_allclose(1 / fit.scale[[0, 3, 5]], 2.0, rtol=0.05)
    np.testing.assert_allclose(1 / fit.scale[[1, 2]], 0.5, rtol=0.05)


@pytest.mark.parametrize("kind", ["asymmetric", "bce", "focal", "an", "role"])
def test_the_loss_of_values_is_the_cross_entropy_of_known_ones(kind):
    config = default_config()
    config.loss.update(kind=kind, reduce="sum", scale=1.0, expected_positives=1.0)
    codes = np.zeros((3, 7), np.int8)
    codes[0, [3, 1]] = codes[1, [0, 2, 4]] = 1
    codes[2, VALUES[0]] = -1
    codes[2, 2] = 1
    scores = drawn(size=(3, 7)).astype(np.float32)
    batch = {"label": codes == 1, "label_mask": codes >= 0, "mask": np.ones(3), "id": np.arange(3)}
    batch["label"] = batch["label"].astype(np.float32)
    tree = LabelTree(attributes=(COLOR, SIZE))
    objectives = [Objective(config.loss, training_labels(config, codes, tree=some)) for some in (tree, LabelTree())]
    if objectives[0].loss.keeps_values:
        pytest.skip("values per image")
    logits = SOFTMAX(scores)
    found, tags = (
        objective._element_losses(jnp.asarray(logits), objective._examples(batch, 0, None)) for objective in objectives
    )
    rows, labels = [0, 1, 0, 1, 2], [3, 0, 1, 2, 2]
    expected = np.zeros((3, 7))
    for row, label in zip(rows, labels, strict=True):
        group = next(group for group in VALUES if label in group)
        expected[row, label] = -np.log(softmax(scores[row, group])[group.index(label)])
    values = [label for group in VALUES for label in group]
    np.testing.assert_allclose(found[:, values], expected[:, values], atol=1e-5)
    np.testing.assert_array_equal(found[:, TAGS], tags[:, TAGS])


def test_one_value_is_assigned():
    scores = np.array([[0.4, 0.2, 0.8, 0.35, 0.6, 0.25, 0.3]])
    assert np.flatnonzero(assign(scores, 0.5, (COLOR, SIZE))[0]).tolist() == [0, 2, 4]
    left_out = Attribute("color", (0, -1, 5))
    assert np.flatnonzero(assign(scores, 0.5, (left_out, SIZE))[0]).tolist() == [2, 4]
    assert np.flatnonzero(assign(scores, 0.3, (left_out, SIZE))[0]).tolist() == [0, 2, 3, 4, 6]


def test_a_tree_does_not_change_values():
    tree = LabelTree(((4, 0), (3, 6)), ((5, 6),), (COLOR,))
    scores = np.array([[0.4, 0.2, 0.8, 0.55, 0.9, 0.05, 0.3]])
    found = Consistency.of(tree, 0.5, 7)(scores)
    np.testing.assert_array_equal(found[:, VALUES[0]], scores[:, VALUES[0]])
    assert found[0, 6] >= 0.55
