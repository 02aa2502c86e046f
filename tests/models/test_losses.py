import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.models import experts, losses
from mlmoe_jax.models.registries import LOSSES

ARRAYS = np.load(PARITY / "losses.npz")
CASES = json.loads((PARITY / "losses.json").read_text())["cases"]
LOGITS = np.array([-100.0, -30, -17, -5, -0.1, 0, 0.1, 5, 17, 30, 100], np.float32)


def plain_asl(logits, labels, **options):
    return losses.asymmetric_loss(logits, labels, **{"gamma_neg": 0, "gamma_pos": 0, "clip": 0} | options)


def published(case):
    """Return the loss of a golden case, with the reduction of the published code."""

    def loss(x, y):
        if "gamma_neg" in case:
            options = {key: case[key] for key in ("gamma_neg", "gamma_pos", "clip", "eps")}
            values = losses.asymmetric_loss(x, y, **options, detach=case["detached"])
        else:
            values = losses.binary_cross_entropy(x, y)
        how, scale = {"sum": ("sum", 1.0), "mean": ("mean", 1.0), "1000*mean": ("mean", 1000.0)}[case["reduction"]]
        return losses.reduce(values, jnp.ones_like(y), jnp.ones(len(y)), how=how, scale=scale)

    return loss


@pytest.mark.parametrize(("suffix", "tolerance"), [("", 1e-5), ("_f64", 1e-12)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_values_and_gradients_of_the_authors_code(case, suffix, tolerance):
    dtype = np.float64 if suffix else np.float32
    with jax.enable_x64(bool(suffix)):
        value, gradient = jax.value_and_grad(published(case))(ARRAYS["x"].astype(dtype), ARRAYS["y"].astype(dtype))
        value, gradient = float(value), np.asarray(gradient)
    assert gradient.dtype == dtype
    assert value == pytest.approx(case["value" + suffix], rel=tolerance)
    reference = ARRAYS[f"grad/{case['name']}{suffix}"]
    np.testing.assert_allclose(gradient, reference, rtol=0, atol=tolerance * np.abs(reference).max())


def test_negatives_below_the_clip_have_zero_loss_and_gradient():
    x = jnp.array([-100.0, -5.0, -2.95])  # p = 0.0497 at −2.95
    for gamma in (0, 0.5, 4):
        values, gradient = jax.value_and_grad(
            lambda x, gamma=gamma: plain_asl(x, jnp.zeros(3), gamma_neg=gamma, clip=0.05, detach=False).sum()
        )(x)
        assert values == 0
        np.testing.assert_array_equal(gradient, 0)
    assert plain_asl(jnp.array([-2.9]), jnp.zeros(1), clip=0.05)[0] > 0


def test_no_gradient_through_a_logarithm_at_its_floor():
    x, y = jnp.array([-20.0, 20.0, -10.0]), jnp.array([1.0, 0.0, 1.0])
    values = plain_asl(x, y, eps=1e-5)
    gradient = jax.grad(lambda x: plain_asl(x, y, eps=1e-5).sum())(x)
    np.testing.assert_allclose(values[:2], -math.log(1e-5), rtol=1e-6)
    np.testing.assert_array_equal(gradient[:2], 0)
    assert gradient[2] == pytest.approx(-1, abs=1e-4)


def test_detaching_changes_the_gradient_and_not_the_value():
    def run(detach):
        return jax.value_and_grad(lambda x: plain_asl(x, jnp.zeros(1), gamma_neg=2, detach=detach).sum())(jnp.zeros(1))

    (value, detached), (same, full) = run(True), run(False)
    assert value == same
    # d/dx p² (−log q): p²·p with the weight held, and 2p·p(1−p)·(−log q) more without.
    assert detached[0] == pytest.approx(0.125)
    assert full[0] == pytest.approx(0.125 + 0.25 * math.log(2))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_without_focus_and_clip_all_losses_are_cross_entropy(label):
    x = LOGITS[np.abs(LOGITS) < 18]  # beyond, the floor of the logarithm shows
    y = np.full_like(x, label)
    bce = losses.binary_cross_entropy(x, y)
    np.testing.assert_allclose(plain_asl(x, y), bce, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(losses.focal_loss(x, y, gamma=0), bce, rtol=1e-6)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_cross_entropy_is_exact_at_any_logit(label):
    y = np.full_like(LOGITS, label)
    x = LOGITS.astype(np.float64)
    expected = np.logaddexp(0, np.where(y, -x, x))
    np.testing.assert_allclose(losses.binary_cross_entropy(LOGITS, y), expected, rtol=1e-6, atol=1e-38)
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


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 2, 4])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_extreme_logits_have_finite_gradients(gamma, detach, label):
    y = np.full_like(LOGITS, label)
    for loss in (
        lambda x: plain_asl(x, y, gamma_neg=gamma, gamma_pos=gamma, detach=detach).sum(),
        lambda x: plain_asl(x, y, gamma_neg=gamma, gamma_pos=gamma, clip=0.05, detach=detach).sum(),
        lambda x: losses.focal_loss(x, y, gamma=gamma, detach=detach).sum(),
    ):
        value, gradient = jax.value_and_grad(loss)(LOGITS)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0.01


def test_half_precision_logits_are_computed_in_float32():
    x = jnp.array([1.5], jnp.bfloat16)
    for loss in (plain_asl, losses.binary_cross_entropy, losses.focal_loss):
        values = loss(x, jnp.ones(1, jnp.bfloat16))
        assert values.dtype == jnp.float32
        assert values[0] == loss(jnp.array([1.5]), jnp.ones(1))[0]


def test_reduce_of_a_full_batch():
    values = np.random.default_rng(0).random((3, 4), np.float32)
    ones = (jnp.ones((3, 4)), jnp.ones(3))
    assert losses.reduce(values, *ones) == pytest.approx(values.sum() / 12)
    assert losses.reduce(values, *ones, how="sum", scale=2.0) == pytest.approx(2 * values.sum())


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
@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        (
            "asymmetric",
            {"gamma_neg": 3.0, "gamma_pos": 1.0, "clip": 0.05, "eps": 1e-3},
            lambda x, y: losses.asymmetric_loss(x, y, gamma_neg=3, gamma_pos=1, clip=0.05, eps=1e-3),
        ),
        ("bce", {"positive_weight": 2.0}, lambda x, y: losses.binary_cross_entropy(x, y, positive_weight=2)),
        ("focal", {"gamma": 3.0, "gamma_neg": 7.0}, lambda x, y: losses.focal_loss(x, y, gamma=3)),
        ("softmax", {}, losses.softmax_cross_entropy),
    ],
)
def test_a_builder_reads_the_settings_of_its_loss(kind, changes, expected):
    settings = default_config().loss
    settings.update(changes)
    x, y = jnp.array([[0.5, -1.0, 2.0]]), jnp.array([[1.0, 0.0, 0.0]])
    examples = losses.Examples(y, jnp.ones_like(y), jnp.ones(1))
    np.testing.assert_allclose(LOSSES[kind](settings)(x, examples), expected(x, y), rtol=1e-6)


def test_training_labels_are_counted_only_if_a_loss_depends_on_them():
    class Never(TrainingLabels):
        def _parts(self):
            raise AssertionError("the training labels are counted without need")

    for kind in LOSSES:
        LOSSES[kind](default_config().loss, Never(np.zeros((2, 3), np.int8), "negative"))
