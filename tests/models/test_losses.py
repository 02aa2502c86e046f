import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.models import experts, losses
from mlmoe_jax.models.loss_catalog import LOSSES

ARRAYS = np.load(PARITY / "losses.npz")
CASES = json.loads((PARITY / "losses.json").read_text())["cases"]
LOGITS = np.array([-100.0, -30, -17, -5, -0.1, 0, 0.1, 5, 17, 30, 100], np.float32)


def plain_asl(logits, labels, **options):
    return losses.asymmetric_loss(logits, labels, **{"gamma_neg": 0, "gamma_pos": 0, "clip": 0} | options)


SCALES = {"sum": ("sum", 1.0), "mean": ("mean", 1.0), "1000*mean": ("mean", 1000.0)}  # of the published reductions


def setting_of(case) -> tuple:
    """The reduction of a case, whether the focal weight is detached, and the options of the asymmetric loss, if any."""
    options = [(key, case[key]) for key in ("gamma_neg", "gamma_pos", "clip", "eps") if key in case]
    return case["reduction"], case.get("detached"), *options


# Several repositories have the same loss.
PUBLISHED = {setting: [case for case in CASES if setting_of(case) == setting] for setting in map(setting_of, CASES)}


@pytest.mark.variants("suffix")
@pytest.mark.parametrize(("suffix", "tolerance"), [("_f64", 1e-12), ("", 1e-5)])
@pytest.mark.parametrize("setting", PUBLISHED, ids=lambda setting: PUBLISHED[setting][0]["name"])
def test_values_and_gradients_of_the_authors_code(setting, suffix, tolerance):
    (reduction, detached, *options), dtype = setting, np.float64 if suffix else np.float32
    how, scale = SCALES[reduction]

    @jax.jit
    @jax.value_and_grad
    def run(x, y):
        if options:
            values = losses.asymmetric_loss(x, y, **dict(options), detach=detached)
        else:
            values = losses.binary_cross_entropy(x, y)
        return losses.reduce(values, jnp.ones_like(y), jnp.ones(len(y)), how=how, scale=scale)

    with jax.enable_x64(bool(suffix)):
        value, gradient = jax.device_get(run(ARRAYS["x"].astype(dtype), ARRAYS["y"].astype(dtype)))
    assert gradient.dtype == dtype
    for case in PUBLISHED[setting]:
        assert value == pytest.approx(case["value" + suffix], rel=tolerance), case["name"]
        reference = ARRAYS[f"grad/{case['name']}{suffix}"]
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=tolerance * np.abs(reference).max())


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_cross_entropy_is_exact_at_any_logit(label):
    y = np.full_like(LOGITS, label)
    x = LOGITS.astype(np.float64)
    expected = np.logaddexp(0, np.where(y, -x, x))
    np.testing.assert_allclose(losses.binary_cross_entropy(LOGITS, y), expected, rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(losses.focal_loss(LOGITS, y, gamma=0), expected, rtol=1e-6, atol=1e-38)
    gradient = jax.grad(lambda x: losses.binary_cross_entropy(x, y).sum())(LOGITS)
    np.testing.assert_allclose(gradient, 1 / (1 + np.exp(-x)) - y, rtol=1e-5, atol=1e-9)


def test_positive_weight_affects_only_positives():
    x, y = jnp.zeros((2, 2)), jnp.array([[1.0, 1.0], [0.0, 0.0]])
    ln2 = math.log(2)
    np.testing.assert_allclose(losses.binary_cross_entropy(x, y, positive_weight=3.0), [[3 * ln2] * 2, [ln2] * 2])
    by_class = losses.binary_cross_entropy(x, y, positive_weight=jnp.array([3.0, 0.5]))
    np.testing.assert_allclose(by_class, [[3 * ln2, 0.5 * ln2], [ln2, ln2]])


def test_focal_loss_by_hand():
    x, y = jnp.array([0.0, 0.0, math.log(3)]), jnp.array([1.0, 0.0, 1.0])  # p = 1/2, 1/2, 3/4
    expected = np.array([0.25 * math.log(2), 0.25 * math.log(2), math.log(4 / 3) / 16])
    np.testing.assert_allclose(losses.focal_loss(x, y), expected, rtol=1e-6)
    np.testing.assert_allclose(losses.focal_loss(x, y, alpha=0.25), expected * [0.25, 0.75, 0.25], rtol=1e-6)


@pytest.mark.variants(gamma=(0, 0.5, 2))
@pytest.mark.parametrize("gamma", [0, 0.5, 1, 2, 4])
@pytest.mark.parametrize("detach", [True, False])
def test_extreme_logits_have_finite_gradients(gamma, detach):
    labels = np.repeat(np.float32([[0], [1]]), len(LOGITS), axis=1)
    asymmetric = partial(plain_asl, labels=labels, gamma_neg=gamma, gamma_pos=gamma, detach=detach)
    clipped = partial(asymmetric, clip=0.05)
    focal = partial(losses.focal_loss, labels=labels, gamma=gamma, detach=detach)

    @jax.jit
    def run(x):
        return [jax.value_and_grad(lambda x, loss=loss: loss(x).sum())(x) for loss in (asymmetric, clipped, focal)]

    for value, gradient in run(np.stack([LOGITS, LOGITS])):
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        assert (np.abs(gradient).max(axis=1) > 0.01).all(), "for absent and for present labels"


def test_half_precision_logits_are_computed_in_float32():
    x = jnp.array([1.5], jnp.bfloat16)
    for loss in (plain_asl, losses.binary_cross_entropy, losses.focal_loss):
        values = loss(x, jnp.ones(1, jnp.bfloat16))
        assert values.dtype == jnp.float32
        assert values[0] == loss(jnp.array([1.5]), jnp.ones(1))[0]


@pytest.mark.parametrize("anything", [7.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["mean", "sum"])
def test_masked_entries_have_no_effect(anything, how):
    values = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    label_mask, mask = jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]), jnp.array([1.0, 1.0, 0.0])
    valid = (label_mask * mask[:, None]) > 0
    damaged = jnp.where(valid, values, anything)
    value, gradient = jax.value_and_grad(lambda v: losses.reduce(v, label_mask, mask, how=how))(damaged)
    share = 1 / 3 if how == "mean" else 1.0
    assert value == pytest.approx(8 * share)
    np.testing.assert_allclose(gradient, np.where(valid, share, 0.0))


def test_reduce_without_valid_entries_is_zero():
    value, gradient = jax.value_and_grad(losses.reduce)(jnp.full((2, 2), jnp.nan), jnp.ones((2, 2)), jnp.zeros(2))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("logits", [[0.3, -1.0, 2.0], [0.0, -200.0, 1.0], [0.0, 0.0, 500.0]])
def test_gate_entropy_through_a_softmax_is_that_of_log_softmax(logits):
    def reference(x):
        log_w = jax.nn.log_softmax(x)
        return -jnp.sum(jnp.exp(log_w) * log_w)

    x = jnp.array(logits)
    value, gradient = jax.value_and_grad(lambda x: experts.gate_entropy(jax.nn.softmax(x)))(x)
    expected, slope = jax.value_and_grad(reference)(x)
    assert value == pytest.approx(float(expected), abs=1e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


def test_softmax_cross_entropy_sums_to_that_of_the_image():
    logits = jnp.array([[2.0, -1.0, 0.5], [300.0, -300.0, 0.0]])
    labels = jnp.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    ours = losses.softmax_cross_entropy(logits, labels)
    assert ours.shape == (2, 3)
    expected = [-math.log(math.exp(0.5) / (math.exp(2) + math.exp(-1) + math.exp(0.5))), 600.0]
    np.testing.assert_allclose(ours.sum(axis=1), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: losses.softmax_cross_entropy(x, labels).sum())(logits)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits) - labels, atol=1e-6)


# ------------------------------------------------------------------------------------------------- losses of a config
def test_training_labels_are_counted_only_if_a_loss_depends_on_them():
    class Never(TrainingLabels):
        def _parts(self):
            raise AssertionError("the training labels are counted without need")

    for kind in LOSSES:
        LOSSES[kind](default_config().loss, Never(np.zeros((2, 3), np.int8), "negative"))
