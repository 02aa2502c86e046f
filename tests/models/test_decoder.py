"""Behavior of the query decoder that the parity tests of the query head do not cover."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.programs import calls
from helpers.query_heads import decoder_settings

from mlmoe_jax.models.heads.dr_moe import GroupTokenDecoder
from mlmoe_jax.models.layers.detr import DecoderLayer, EncoderLayer, QueryAttention
from mlmoe_jax.models.layers.positions import detr_positions
from mlmoe_jax.models.layers.transformer import Mlp
from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.query_decoder import QueryDecoder

B, C, D, Q, E, GRID = 2, 12, 8, 5, 3, (2, 3)
N = GRID[0] * GRID[1]


def shapes(make):
    """Return (structure, parameters without values)."""
    definition, params, _ = ModelDef.split(nnx.eval_shape(make))
    return definition, params


def filled(make, seed=0):
    """Return a module with random values, so that every parameter has an effect."""
    definition, params = shapes(make)
    random = np.random.RandomState(seed)
    values = {path: random.randn(*v.shape) / v.shape[0] ** 0.5 for path, v in params.items()}
    values |= {path: random.uniform(0.5, 1.5, v.shape) for path, v in params.items() if path.endswith("scale")}
    return definition.merge({path: jnp.asarray(value, jnp.float32) for path, value in values.items()})


def draw(*shape, seed=1):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), jnp.float32)


@pytest.fixture(scope="module")
def features():
    return Features(None, None, draw(B, N, C), GRID)


def size(params, start) -> int:
    return sum(int(np.prod(v.shape)) for path, v in params.items() if path.startswith(start))


def test_computation_shared_by_all_images_runs_once(features):
    settings = decoder_settings(width=D, heads=2, hidden=6)
    definition, params = shapes(lambda: QueryDecoder(C, Q, settings, rngs=nnx.Rngs(0)))
    run = jax.make_jaxpr(lambda params, tokens: definition.merge(params)(Features(None, None, tokens, GRID)))
    alone = count_macs(run(params, features.patches[:1]).jaxpr)
    attention = 2 * 2 * N**2 * D + 2 * 2 * Q * (N + Q) * D  # of two encoder and two decoder layers
    assert alone == definition.merge(params).layer_macs(N) - definition.merge(params).norm_macs(N) + attention
    # the first self-attention, and the projection of the first queries
    shared = 4 * Q * D**2 + 2 * Q**2 * D + Q * D**2
    assert count_macs(run(params, features.patches).jaxpr) == B * alone - (B - 1) * shared


def test_prompts_join_the_memory_without_positions(features):
    groups = {"co": [0] * Q}  # one group, whose prompts all labels see
    settings = decoder_settings(width=D, heads=2, hidden=6, encoder_layers=1, style="q2l")
    model = filled(lambda: GroupTokenDecoder(C, groups, settings, groups=1, per_group=E, rngs=nnx.Rngs(0)))
    prompted = replace(features, prompts=draw(B, E, C, seed=2))
    memory, positions = jax.jit(lambda: model.encode(features.patches, GRID))()
    assert memory.shape == (B, N, D)
    np.testing.assert_array_equal(positions, detr_positions(GRID, D))
    placed = np.concatenate([positions, np.zeros((1, E, D), np.float32)], axis=1)

    @jax.jit
    def run():
        joined = jnp.concatenate([memory, model.project(prompted.prompts)], axis=1)
        return model(prompted), model.decode(joined, placed)

    np.testing.assert_allclose(*run(), atol=1e-6)


def test_dropout_applies_to_attention_weights_mlps_and_outputs():
    layer = {"init": "xavier", "dtype": None, "dropout": 0.5, "attention_dropout": 0.5}
    only = layer | {"attention_dropout": 0.0}
    tokens = draw(B, N, D)
    attention = filled(lambda: QueryAttention(D, 2, dropout=0.5, rngs=nnx.Rngs(0)))
    feed = filled(lambda: Mlp(D, 6, activation=jax.nn.relu, dropout=0.5, rngs=nnx.Rngs(0)))
    encoder = filled(lambda: EncoderLayer(D, 2, 6, rngs=nnx.Rngs(0), **layer))
    whole = filled(lambda: DecoderLayer(D, 2, 6, self_attention="on", rngs=nnx.Rngs(0), **layer))
    identity = filled(lambda: DecoderLayer(D, 2, 6, self_attention="identity", rngs=nnx.Rngs(0), **layer))
    without = filled(lambda: DecoderLayer(D, 2, 6, self_attention="on", rngs=nnx.Rngs(0), **only))
    # on attention weights, between the layers of an MLP, and on the output of each part
    for expected, module, inputs in (
        (1, attention, (tokens, tokens, tokens)),
        (1, feed, (tokens,)),
        (1 + 1 + 2, encoder, (tokens,)),
        (2 + 1 + 3, whole, (tokens, None, tokens, tokens)),
        (1 + 1 + 3, identity, (tokens, None, tokens, tokens)),
        (1 + 3, without, (tokens, None, tokens, tokens)),
        (1 + 2, filled(lambda: EncoderLayer(D, 2, 6, rngs=nnx.Rngs(0), **only)), (tokens,)),
    ):
        for training in (False, True):
            module.train() if training else module.eval()
            run = jax.make_jaxpr(lambda key, m=module, x=inputs: m(*x, rngs=nnx.Rngs(key)))
            assert calls(run(jax.random.key(0)).jaxpr, "random_bits") == expected * training
