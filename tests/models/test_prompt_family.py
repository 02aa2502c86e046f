"""Relations between the methods of prompt tuning; pretrained/test_official.py compares outputs with PyTorch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.prompts import make_prompts

from mlmoe_jax.models.adapters.prompts import DeepPrompts, PrunablePrompts, ShallowPrompts, clip_to_bounds
from mlmoe_jax.models.backbones.vit import ViT, ViTShape

SHAPE = ViTShape(width=32, depth=3, heads=4, patch=8, native=32, layer_scale=0.5)
B, P = 3, 4


def made(kind, **settings):
    return make_prompts(kind, SHAPE, nnx.Rngs(0), **{"count": P} | settings)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------------------------------------------- VPT, GateVPT
def test_gates_and_temperatures_start_as_in_the_authors_code():
    prompts = made(ShallowPrompts, gated=True, gate_init=5.0, learn_temperature=True)
    np.testing.assert_array_equal(prompts.gate[...], [-5, -5])
    np.testing.assert_array_equal(prompts.temperature[...], [1, 1, 1])
    prompts.temperature[...] = jnp.array([1e-4, 2.0, 50.0])
    np.testing.assert_allclose(prompts(B).temperature, [0.01, 2, 10])
    assert made(ShallowPrompts)(B).temperature is None


def test_only_temperatures_have_bounds():
    values = jnp.array([-3.0, 0.01, 2.0, 12.0])
    params = {"prompts/temperature": values, "prompts/gate": values, "head/temperature": values}
    bounded = clip_to_bounds(params)
    np.testing.assert_allclose(bounded.pop("prompts/temperature"), [0.01, 0.01, 2, 10])
    for path, value in bounded.items():
        np.testing.assert_array_equal(value, params[path])


def test_temperatures_beyond_their_bounds_have_a_gradient():
    graph, state = nnx.split(made(ShallowPrompts, learn_temperature=True))

    def total(state):
        return (nnx.merge(graph, state)(B).temperature * jnp.array([1.0, 2.0, 3.0])).sum()

    state["temperature"].set_value(jnp.array([1e-4, 10.0, 50.0]))
    np.testing.assert_allclose(jax.grad(total)(state)["temperature"][...], [1, 2, 3])


# ----------------------------------------------------------------------------------------------------------- E2VPT
def prunable(**options):
    return drawn(made(PrunablePrompts, **{"key_values": 3} | options), seed=1)


def test_a_pruned_token_is_as_if_absent():
    masked, fewer = prunable(pruning="fixed", pruned="absent"), prunable(count=2)
    masked.segment_mask[...], masked.token_mask[...] = jnp.ones((P, 16)), jnp.array([1.0, 0.0, 1.0, 0.0])
    fewer.deep[...], fewer.key_value[...] = masked.deep[:, :, ::2], masked.key_value[...]
    vit = drawn(lambda: ViT(SHAPE, rngs=nnx.Rngs(0)), 0.5, 1)
    image = np.random.default_rng(2).normal(size=(B, 32, 32, 3)).astype(np.float32)
    zeroed = dataclasses.replace(masked(B), present=None)
    without, absent, present = jax.jit(lambda: [vit(image, given).cls for given in (fewer(B), masked(B), zeroed)])()
    close(absent, without)
    assert np.abs(present - without).max() > 1e-3


def test_segments_are_interleaved_and_the_same_in_every_block():
    masked = prunable(pruning="learned")
    before = np.asarray(masked.deep[...])
    masked.token_mask[...] = jnp.array([1.0, 2.0, 1.0, 1.0])
    masked.segment_mask[...] = jnp.ones((P, 16)).at[2, 3].set(0.0)
    expected = before.copy()
    expected[:, :, 1] *= 2
    expected[:, :, 2, 3::16] = 0
    np.testing.assert_allclose(masked(B).tokens, expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------- projection and dropout
def test_projected_prompts_have_the_width_of_the_backbone():
    prompts = made(DeepPrompts, project=6)
    assert prompts.deep.shape == (3, 1, P, 6)
    assert np.abs(np.asarray(prompts.deep[...])).max() <= np.sqrt(6 / (3 * 64 + 6))
    kernel, bias = (np.asarray(x) for x in (prompts.projection.kernel, prompts.projection.bias))
    close(prompts(B).tokens, np.asarray(prompts.deep) @ kernel + bias)
    assert kernel.std() == pytest.approx(np.sqrt(2 / 32), rel=0.15), "kaiming normal by what goes out"


def test_dropout_is_only_for_training_and_independent_per_image():
    prompts = drawn(made(DeepPrompts, dropout=0.25), seed=1)
    np.testing.assert_array_equal(prompts(B).tokens, prompts.deep[...])
    prompts.train()
    dropped = np.asarray(prompts(64, rngs=nnx.Rngs(5)).tokens)
    assert dropped.shape == (3, 64, P, 32)
    gone = dropped == 0
    assert gone.mean() == pytest.approx(0.25, abs=0.01)
    assert (gone[:, 0] != gone[:, 1]).any()
    kept = np.broadcast_to(np.asarray(prompts.deep[...]) / 0.75, dropped.shape)
    np.testing.assert_allclose(dropped[~gone], kept[~gone], rtol=1e-6)
