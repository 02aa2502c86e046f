"""Attention, GELU and LayerNorm with their own backward passes, against plain forms and their automatic gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlmoe_jax.models.layers import recompute
from mlmoe_jax.models.layers.dispatch import attend
from mlmoe_jax.models.layers.recompute import LayerNorm, gelu, in_backward_pass

FORWARD, GRADIENT = 2e-6, 5e-6
MASK = np.random.default_rng(0).random((5, 7)) < 0.6
MASK[0] = True
MASK[3] = False  # a query that may not attend to any key


def textbook(query, key, value, mask=None):
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key) / np.sqrt(query.shape[-1])
    scores = scores if mask is None else jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqt,bthd->bqhd", jax.nn.softmax(scores, axis=-1), value)


def tokens(number, batch=2, *, heads=3, width=8, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (batch, number, heads, width), dtype)


def with_gradients(function, *arguments):
    """Return the values of `function` and its gradients for a slope that differs by entry."""
    values, backward = jax.vjp(function, *arguments)
    slope = jnp.cos(jnp.arange(values.size, dtype=jnp.float32)).reshape(values.shape).astype(values.dtype)
    return values, *backward(slope)


def assert_near(ours, theirs, forward=FORWARD, gradient=GRADIENT):
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = (np.asarray(part, np.float64) for part in (one, other))
        assert np.abs(one - other).max() <= (gradient if index else forward) * np.abs(other).max(), index


@pytest.mark.variants("batches")
@pytest.mark.parametrize("mask", [None, MASK, jnp.asarray(MASK)], ids=["all", "constant mask", "traced mask"])
@pytest.mark.parametrize("batches", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_attend(mask, batches):
    parts = tokens(5, batches[0]), tokens(7, batches[1], seed=1), tokens(7, batches[1], seed=2)
    mine, plain = (jax.jit(partial(with_gradients, partial(form, mask=mask))) for form in (attend, textbook))
    assert_near(mine(*parts), plain(*parts))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_attend_in_16_bits(dtype):
    parts = [tokens(number, seed=seed, dtype=dtype) for seed, number in enumerate((5, 7, 7))]
    exact = with_gradients(textbook, *(part.astype(jnp.float32) for part in parts))
    assert_near(with_gradients(attend, *parts), [part.astype(dtype) for part in exact], 0.02, 0.02)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gelu(dtype):
    x = jnp.linspace(-6, 6, 241, dtype=jnp.float32).astype(dtype)
    mine, plain = (jax.jit(partial(with_gradients, form)) for form in (gelu, partial(jax.nn.gelu, approximate=False)))
    exact = plain(x.astype(jnp.float32))
    tolerance = FORWARD if dtype == jnp.float32 else 0.005
    assert_near(mine(x), [part.astype(dtype) for part in exact], tolerance, 2 * tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_norm(dtype):
    x = (3 + 2 * tokens(5, dtype=jnp.float32)).astype(dtype)
    layers = LayerNorm(8, epsilon=1e-6, rngs=nnx.Rngs(0)), nnx.LayerNorm(8, use_fast_variance=False, rngs=nnx.Rngs(0))
    scale, bias = jnp.linspace(0.5, 2, 8), jnp.linspace(-1, 1, 8)

    def form(layer, x, scale, bias):
        layer = nnx.clone(layer)  # so that its parameters can be traced values
        layer.scale[...], layer.bias[...] = scale, bias
        return layer(x)

    mine, theirs = (jax.jit(partial(with_gradients, partial(form, layer)))(x, scale, bias) for layer in layers)
    assert mine[0].dtype == jnp.float32
    assert_near(mine, theirs, gradient=GRADIENT if dtype == jnp.float32 else 0.01)


# ---------------------------------------------------------------------------------------------------------- the memory
def test_a_value_of_the_backward_pass_is_unchanged(monkeypatch):
    small = jnp.ones((3, recompute.MIN_RECOMPUTED - 1))
    assert in_backward_pass(small, small) is small
    monkeypatch.setattr(recompute, "MIN_RECOMPUTED", 0)
    kept, slope = tokens(5, dtype=jnp.float16), 1e6 * tokens(5, seed=1)  # a slope beyond the numbers of float16
    value = in_backward_pass(kept, slope)
    assert value.dtype == kept.dtype
    np.testing.assert_array_equal(value, kept)


def attention_layer(x):
    return attend(x, x, x) + x


def gelu_layer(x):
    return gelu(x @ jnp.eye(32))


def layer_norm_layer(x):
    return LayerNorm(32, epsilon=1e-6, rngs=nnx.Rngs(0))(x) * 1.5 + x


def temporaries(layer, depth, x):
    """Return the bytes of temporary arrays of the compiled gradient of `depth` layers, one after another."""

    def form(x):
        for _ in range(depth):
            x = layer(x)
        return jnp.sum(jnp.cos(x))

    return jax.jit(jax.grad(form)).lower(x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.variants("layer")
@pytest.mark.parametrize(("layer", "arrays"), [(attention_layer, 2.5), (gelu_layer, 1.5), (layer_norm_layer, 1.5)])
def test_the_compiled_backward_pass_computes_again_instead_of_keeping(layer, arrays, monkeypatch):
    """Each further layer keeps its input, attention its result too; weights would be 8 arrays of that size here."""
    monkeypatch.setattr(recompute, "MIN_RECOMPUTED", 0)
    x = tokens(256, 4, heads=2, width=32)
    assert temporaries(layer, 10, x) - temporaries(layer, 5, x) <= 5 * arrays * x.nbytes
