"""Banks, gates and their combination for one feature per label, each alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn

from mlmoe_jax.models.experts import Gates, LabelExperts
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
