from dataclasses import replace

import numpy as np
import pytest
from helpers.scored_run import drawn_split
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from mlmoe_jax.config import default_config
from mlmoe_jax.evaluation.decisions.calibration_fit import (
    Posterior,
    fit_calibration,
    fit_posteriors,
    fit_scales,
)
from mlmoe_jax.runs.decisions import to_logits

METHODS = ("temperature", "platt")


def case(images=400, labels=3, scale=3.0, offset=1.0, seed=0):
    """Probabilities whose logits are too large by a factor and shifted, the labels, and a mask."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(-0.5, 1.5, (images, labels))
    return expit(scale * logits + offset), draw.random(logits.shape) < expit(logits), draw.random(logits.shape) < 0.9


def fit(scores, positive, valid, *, method):
    """Return the function from raw to corrected scores."""
    function = fit_scales(to_logits(scores), positive, valid, method=method)
    return lambda new: function(to_logits(new))


def fit_one(logits, targets, variance):
    """Return the parameters of one label, without bounds, and the variances of their posterior."""
    known = np.ones((1, len(logits)), bool)
    posterior = Posterior(logits[None], targets[None], known, np.zeros(2), np.full(2, variance))
    theta, covariance = fit_posteriors(posterior, np.ones((1, 2), bool), np.zeros((1, 2)))
    return theta[0], covariance[0].diagonal()


def test_a_fit_with_a_prior_is_penalized_logistic_regression():
    scores, positive, _ = case()
    logits = logit(scores[:, 0])
    features = np.stack([logits, np.ones(len(scores))], axis=1)
    for variance in (0.01, 1.0, 100.0):
        theirs = LogisticRegression(C=variance, fit_intercept=False, tol=1e-12, solver="newton-cholesky")
        theta, variances = fit_one(logits, positive[:, 0], variance)
        np.testing.assert_allclose(theta, theirs.fit(features, positive[:, 0]).coef_[0], rtol=1e-6)
        share = expit(features @ theta)
        hessian = features.T @ np.diag(share * (1 - share)) @ features + np.eye(2) / variance
        np.testing.assert_allclose(variances, np.linalg.inv(hessian).diagonal(), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_label_with_few_positives_is_drawn_towards_the_shared_function(method):
    scores, positive, valid = case(labels=6)
    scores[:, 5] = expit(logit(scores[:, 5]) + 3)  # unlike the other labels
    differences = []
    for images in (0, 5, 40, 400):
        known = valid.copy()
        known[images:, 5] = False
        *others, few = fit(scores, positive, known, method=method)(np.full((1, 6), 0.7))[0]
        differences.append(abs(few - np.mean(others)))
    assert differences[0] < 0.05
    assert differences[0] < differences[2] < differences[3]


def test_a_label_whose_scores_are_wrong_keeps_its_order():
    scores, positive, valid = case(labels=2)
    both = np.stack([scores[:, 0], 1 - scores[:, 0]], 1)
    right, wrong = fit_scales(to_logits(both), positive[:, [0, 0]], valid, method="platt").scale
    assert wrong > 0
    assert right > 10 * wrong


def test_the_metrics_after_the_fit_are_of_other_images():
    scores, positive, _ = case(200)
    table = replace(drawn_split("val", 200), scores=scores, codes=positive.astype(np.int8))
    config = default_config()
    for method in METHODS:
        config.calibration.method = method
        found = fit_calibration(table, "abc", config)
        assert found["after"]["ECE_macro"] < 0.5 * found["before"]["ECE_macro"]
        assert found["after"]["Brier_pooled"] < found["before"]["Brier_pooled"]
    random = replace(table, codes=np.random.default_rng(3).permutation(table.codes))
    base = random.codes.mean(axis=0)
    assert fit_calibration(random, "abc", config)["after"]["Brier_pooled"] > np.mean(base * (1 - base)), (
        "nothing to learn"
    )


def test_images_of_a_group_do_not_correct_each_other():
    """With copies of each image and random labels, there is something to learn from copies only."""
    config, draw = default_config(), np.random.default_rng(1)
    scores, positive = draw.random((10, 3)).astype(np.float32), draw.random((10, 3)) < 0.5
    patients = np.repeat(np.arange(10), 30)
    table = replace(drawn_split("val", 300), scores=scores[patients], codes=positive[patients].astype(np.int8))
    grouped = replace(table, groups=patients.astype(str))
    assert fit_calibration(table, "abc", config)["after"]["Brier_pooled"] < 0.24
    assert fit_calibration(grouped, "abc", config)["after"]["Brier_pooled"] > 0.25, "half of the labels are present"
