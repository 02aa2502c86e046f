"""The training loss of a config: kinds, terms, penalties, masks, and the balance of positives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bench import drawn_batch
from helpers.scored_run import drawn_split, write_run

from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.models import losses
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.training.label_prior import read_prior
from mlmoe_jax.training.objective import Objective, training_labels

B, K = 8, 3


def loss_settings(**changes):
    settings = default_config().loss
    settings.update(changes)
    return settings


@functools.cache
def make_prediction() -> Prediction:
    keys = jax.random.split(jax.random.key(1), 3)
    logits, co, dc = (3 * jax.random.normal(key, (B, K)) for key in keys)
    return Prediction(logits, {"co": co, "dc": dc})


def evaluated(settings, prediction, batch):
    """Return the loss and its parts, as one program: operations one by one are many."""
    return jax.device_get(jax.jit(Objective(settings))(prediction, batch))


def value_and_gradient(settings, prediction, batch):
    def loss(logits):
        return Objective(settings)(Prediction(logits), batch)[0]

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(prediction.logits))


ASYMMETRIC = {"gamma_neg": 3.0, "gamma_pos": 1.5, "clip": 0.05, "eps": 0.2}


@pytest.mark.parametrize(
    ("changes", "per_element"),
    [
        ({}, lambda z, y: losses.asymmetric_loss(z, y, gamma_neg=2, gamma_pos=0, clip=0, eps=1e-5)),
        (ASYMMETRIC, lambda z, y: losses.asymmetric_loss(z, y, **ASYMMETRIC)),
        ({"kind": "bce"}, losses.binary_cross_entropy),
        (
            {"kind": "bce", "positive_weight": 2.5},
            lambda z, y: losses.binary_cross_entropy(z, y, positive_weight=2.5),
        ),
        ({"kind": "focal"}, lambda z, y: losses.focal_loss(z, y, gamma=2, detach=True)),
        ({"kind": "focal", "gamma": 1.0, "gamma_neg": 3.0}, lambda z, y: losses.focal_loss(z, y, gamma=1, detach=True)),
        ({"kind": "softmax"}, lambda z, y: y * (jax.nn.logsumexp(z, axis=1, keepdims=True) - z)),
    ],
)
def test_each_kind_of_loss_uses_its_settings(changes, per_element):
    batch, prediction = drawn_batch(B, 4, K), make_prediction()
    ours = value_and_gradient(loss_settings(**changes), prediction, batch)
    expected = jax.value_and_grad(lambda z: 1000 * jnp.mean(per_element(z, batch["label"])))
    theirs = jax.jit(expected)(prediction.logits)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def test_pat_sums_the_loss_of_the_image_and_of_its_quarters():
    """ASL, eq. 4–7, with PAT's settings, and no third term for the mean of both logits."""
    config, batch, drawn = load_config("pat_resnet101", []), drawn_batch(B, 4, K), make_prediction()
    terms = {"cls": drawn.terms["co"], "quarters": drawn.terms["dc"]}
    found, _ = evaluated(config.loss, Prediction(drawn.logits, terms), batch)

    def asymmetric(logits):
        p, y = 1 / (1 + np.exp(-np.asarray(logits, np.float64))), np.asarray(batch["label"], np.float64)
        shifted = np.maximum(p - 0.05, 0)
        return -np.sum(y * np.log(p) + (1 - y) * shifted**4 * np.log(1 - shifted))

    np.testing.assert_allclose(found, sum(map(asymmetric, terms.values())), rtol=1e-5)


def test_reduction_and_scale():
    batch, prediction = drawn_batch(B, 4, K), make_prediction()
    mean = value_and_gradient(loss_settings(scale=1.0), prediction, batch)[0]
    total = value_and_gradient(loss_settings(scale=10.0, reduce="sum"), prediction, batch)[0]
    np.testing.assert_allclose(total, 10 * B * K * mean, rtol=1e-5)


def test_terms_are_weighted_but_reported_unweighted():
    batch, prediction = drawn_batch(B, 4, K), make_prediction()
    settings = loss_settings(terms={"logits": 0.0, "co": 1.0, "dc": 0.25})
    total, parts = evaluated(settings, prediction, batch)
    assert set(parts) == {"loss/co", "loss/dc"}
    alone, _ = evaluated(loss_settings(), Prediction(prediction.terms["dc"]), batch)
    np.testing.assert_allclose(parts["loss/dc"], alone, rtol=1e-6)
    np.testing.assert_allclose(total, parts["loss/co"] + 0.25 * parts["loss/dc"], rtol=1e-6)


def test_penalties_are_means_over_real_images():
    batch, prediction = drawn_batch(B, 4, K), make_prediction()
    batch["mask"][2:] = 0
    penalty = np.array([1.0, 4.0, *[1e6] * (B - 2)], np.float32)
    plain, _ = evaluated(loss_settings(), prediction, batch)
    total, parts = evaluated(loss_settings(), Prediction(prediction.logits, penalties={"load": penalty}), batch)
    assert parts["loss/load"] == 2.5
    np.testing.assert_allclose(total, plain + 2.5, rtol=1e-6)


# ------------------------------------------------------------------------------------------------- balanced losses
@pytest.mark.parametrize(
    ("difficult", "weights"),
    [("negative", [2.0, 3.0, 1.0]), ("ignore", [2.0, 2.0, 1.0]), ("positive", [2.0, 1.0, 1.0])],
)
def test_positives_weigh_as_much_as_the_known_negatives(difficult, weights):
    labels = np.array([[1, 1, 0], [0, 0, 0], [0, 0, -1], [-1, 2, 0]], np.int8)
    np.testing.assert_allclose(TrainingLabels(labels, difficult).negatives_over_positives(False), weights)
    config, batch, prediction = default_config(), drawn_batch(B, 4, K), make_prediction()
    config.loss.kind, config.loss.positive_weight, config.data.difficult_train = "bce", 0.0, difficult
    loss = jax.jit(losses.binary_cross_entropy)(
        prediction.logits, batch["label"], positive_weight=np.array(weights, np.float32)
    )
    found, _ = jax.jit(Objective(config.loss, training_labels(config, labels)))(prediction, batch)
    np.testing.assert_allclose(found, config.loss.scale * np.mean(loss), rtol=1e-6)


def test_unknown_labels_count_as_negatives_of_the_balance():
    labels = np.array([[1, -1], [-1, 0], [-1, -1]], np.int8)
    np.testing.assert_allclose(TrainingLabels(labels, "negative").negatives_over_positives(True), [2.0, 1.0])
    assert TrainingLabels(labels, "negative").unknown_share == pytest.approx(4 / 6)
    assert TrainingLabels(labels, "negative").has_negatives()
    assert not TrainingLabels(labels[:1], "negative").has_negatives()


def test_the_prior_of_a_label_is_its_mean_score_or_its_row_of_a_file(tmp_path):
    config, split = default_config(), drawn_split("train")
    assert read_prior(config, "abc") is None
    config.loss.prior = str(write_run(tmp_path / "first", split))
    np.testing.assert_allclose(read_prior(config, "cab"), split.scores.mean(axis=0)[[2, 0, 1]], rtol=1e-6)
    split.scores[1] = np.nan
    config.loss.prior = str(write_run(tmp_path / "an image could not be read", split))
    np.testing.assert_allclose(read_prior(config, "abc"), np.nanmean(split.scores, axis=0), rtol=1e-6)
    file = tmp_path / "prior.csv"
    file.write_text('Classes,avg_pred\nb,0.25\n"a",0.5\n1542867\n')  # the file of the authors ends in such a line
    config.loss.prior = str(file)
    np.testing.assert_array_equal(read_prior(config, "ab"), [0.5, 0.25])
