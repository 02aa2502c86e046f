"""Banks, gates and their combination for one feature per label, each alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn

from mlmoe_jax.models.experts import Gates, LabelExperts, mix_experts
from mlmoe_jax.models.params import ModelDef

B, K, D, HIDDEN = 4, 5, 12, 6


@pytest.fixture(scope="module")
def features():
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, K, D)), jnp.float32)


def make_experts(shared=2, task=3, **options):
    sizes = {"hidden": HIDDEN, "shared": shared, "task": task}
    return drawn(lambda: LabelExperts(D, K, **sizes, rngs=nnx.Rngs(0), **options), 0.3, 3)


def make_gates(entries=4, **options):
    return drawn(lambda: Gates(D, K, entries, hidden=7, rngs=nnx.Rngs(0), **options), 0.3, 3)


def as_numpy(module):
    return {path: np.asarray(value, np.float64) for path, value in ModelDef.split(module)[1].items()}


# -------------------------------------------------------------------------------------------------------- experts


@pytest.mark.slow
def test_task_experts_have_different_initial_values_within_the_default_bounds():
    rngs = nnx.Rngs(jax.random.key(0, impl="unsafe_rbg"))  # compiles faster than the default generator
    experts = LabelExperts(D, K, kind="ffn", hidden=HIDDEN, shared=0, task=3, rngs=rngs)
    for path, values in as_numpy(experts).items():
        bound = (D if "/up/" in path else HIDDEN) ** -0.5
        assert values.shape[:2] == (K, 3)
        assert len(np.unique(values.reshape(K * 3, -1), axis=0)) == K * 3, path
        assert 0.8 * bound < np.abs(values).max() <= bound, path


def test_the_experts_of_a_label_do_not_depend_on_other_labels(features):
    """The feature of another label changes neither the experts nor the gate of a label."""
    other = features.at[:, 2].add(1.0)
    rest = [0, 1, 3, 4]
    for module in (make_experts(), make_gates()):
        run = jax.jit(lambda x, module=module: jax.tree.leaves(module(x)))
        for before, after in zip(run(features), run(other), strict=True):
            np.testing.assert_array_equal(before[:, rest], after[:, rest])
            assert np.abs(before[:, 2] - after[:, 2]).max() > 1e-3


@pytest.mark.parametrize(("kind", "layers"), [("relu_linear", 1), ("ffn", 2)])
def test_a_bank_is_one_matrix_product_per_layer(features, kind, layers):
    products = str(jax.make_jaxpr(make_experts(kind=kind))(features)).count("dot_general")
    assert products == 2 * layers, "one for the shared bank and one for the task bank, for all sizes"
    assert str(jax.make_jaxpr(make_gates())(features)).count("dot_general") == 2


# ---------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("share", ["per_label", "shared"])
def test_static_gates_do_not_depend_on_the_image(features, share):
    gates = Gates(D, K, 4, kind="static", share=share, rngs=nnx.Rngs(0))
    assert gates.macs == 0
    np.testing.assert_allclose(gates(features), np.full((1, K, 4), 1 / 4), rtol=1e-6)
    assert gates.free_logits.shape == (K if share == "per_label" else 1, 4)
    moved = jnp.arange(gates.free_logits.size, dtype=jnp.float32).reshape(gates.free_logits.shape) ** 1.5
    gates.free_logits[...] = moved
    np.testing.assert_array_equal(gates(features), gates(features + 1))
    np.testing.assert_allclose(gates(features)[0], np.broadcast_to(jax.nn.softmax(moved), (K, 4)), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------- combination
@pytest.mark.parametrize("images", [1, B])
def test_combination_is_a_weighted_sum_in_the_order_of_the_gate(images):
    draw = np.random.default_rng(2)
    w, s, t = draw.random((images, K, 5)), draw.normal(size=(B, K, 2, D)), draw.normal(size=(B, K, 3, D))
    weights, shared, task = (jnp.asarray(x, jnp.float32) for x in (w, s, t))
    expected = np.zeros((B, K, D))
    for b in range(B):
        for k in range(K):
            for e in range(5):
                expected[b, k] += w[b % images, k, e] * (s[b, k, e] if e < 2 else t[b, k, e - 2])
    np.testing.assert_allclose(mix_experts(weights, (shared, task)), expected, rtol=2e-5, atol=1e-6)
    one_hot = jax.nn.one_hot(jnp.full((images, K), 3), 5)
    np.testing.assert_array_equal(mix_experts(one_hot, (shared, task)), task[:, :, 1])


# ----------------------------------------------------------------------------------------------------------- dtype
@pytest.mark.variants("kind")
@pytest.mark.parametrize("kind", ["static", "linear", "mlp"])
def test_bfloat16_products_leave_weights_in_float32(features, kind):
    exact, half = make_gates(kind=kind), make_gates(kind=kind, dtype=jnp.bfloat16)
    weights = half(features)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights, exact(features), atol=0.01)
    assert (weights == exact(features)).all() == (kind != "mlp"), "only the hidden layer is in bfloat16"
    outputs = make_experts(dtype=jnp.bfloat16)(features)
    assert {part.dtype for part in outputs} == {jnp.dtype(jnp.bfloat16)}
    for ours, theirs in zip(outputs, make_experts()(features), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=0.03)
