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
from mlmoe_jax.models.loss_catalog import LOSSES
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


def test_the_first_attribute_may_have_the_fewest_values():
    scores = drawn(size=(5, 7))
    np.testing.assert_array_equal(AttributeSoftmax.of((SIZE, COLOR), 7)(scores), SOFTMAX(scores))


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


def objective_of(kind, codes, attributes=(), **settings):
    """Return an objective, the values that it keeps per image, and the batch of all images, in the third epoch."""
    config = default_config()
    config.loss.update({"kind": kind, "reduce": "sum", "scale": 1.0, "expected_positives": 1.0, **settings})
    objective = Objective(config.loss, training_labels(config, codes, tree=LabelTree(attributes=attributes)))
    label, known = ((codes >= least).astype(np.float32) for least in (1, 0))
    batch = {"label": label, "label_mask": known, "mask": np.ones(len(codes)), "id": np.arange(len(codes))}
    return objective, objective.learned() | objective.noted(), batch


def element_losses(objective, values, batch, logits):
    examples = objective._examples(batch, 2, values)
    return objective._element_losses(jnp.asarray(logits), batch["label"], examples)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {}) for kind in LOSSES if kind != "softmax"), ("csl", {"unknown": "selective", "likelihood_topk": 1})],
)
def test_the_loss_of_values_is_the_cross_entropy_and_that_of_tags_knows_only_tags(kind, settings):
    codes = np.zeros((3, 7), np.int8)
    codes[0, [3, 1]] = codes[1, [0, 2, 4]] = 1
    codes[2, VALUES[0]] = codes[0, 4] = codes[2, 6] = -1
    codes[2, 2] = 1
    scores = drawn(size=(3, 7)).astype(np.float32)
    logits = SOFTMAX(scores)
    of_all, of_tags = (
        objective_of(kind, codes, (COLOR, SIZE), **settings),
        objective_of(kind, codes[:, TAGS], **settings),
    )
    found = element_losses(*of_all, logits)
    expected = np.zeros((3, 7))
    for row, label in zip([0, 1, 0, 1, 2], [3, 0, 1, 2, 2], strict=True):
        group = next(group for group in VALUES if label in group)
        expected[row, label] = -np.log(softmax(scores[row, group])[group.index(label)])
    values = [label for group in VALUES for label in group]
    np.testing.assert_allclose(found[:, values], expected[:, values], atol=1e-5)
    np.testing.assert_array_equal(found[:, TAGS], element_losses(*of_tags, logits[:, TAGS]))
    noted = [
        objective.note(Prediction(jnp.asarray(some)), batch, 2, jax.tree.map(jnp.asarray, values))
        for (objective, values, batch), some in ((of_all, logits), (of_tags, logits[:, TAGS]))
    ]
    jax.tree.map(np.testing.assert_array_equal, *noted)


@pytest.mark.parametrize("kind", ["bce", "csl", "distribution_balanced", "role", "wan"])
def test_there_may_be_no_tags(kind):
    codes = np.eye(3, dtype=np.int8)
    objective, values, batch = objective_of(kind, codes, (Attribute("color", (0, 1, 2)),))
    assert not objective.loss.label_mistakes(default_config(), objective.loss.training_labels())

    def loss(logits):
        return objective(Prediction(logits), batch, values=values)[0]

    logits = AttributeSoftmax(((0, 1, 2),), 3)(np.zeros((3, 3), np.float32))
    assert loss(jnp.asarray(logits)) == pytest.approx(3 * np.log(3))
    assert np.isfinite(jax.grad(loss)(jnp.asarray(logits))).all()


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
