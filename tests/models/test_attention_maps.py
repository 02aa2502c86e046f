"""Attention maps of labels against softmaxes by hand, and that maps cost nothing if not requested.

Maps of prompts and the class token: test_foundation_models.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.programs import calls, without_dead_code
from helpers.query_heads import decoder_settings

from mlmoe_jax.config import load_config
from mlmoe_jax.config.loading import override_pairs
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.build import build_model
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.heads.dr_moe import GroupTokenDecoder, label_prompt_mask
from mlmoe_jax.models.heads.gcn import ADDGCNHead
from mlmoe_jax.models.heads.query import QueryHead
from mlmoe_jax.models.layers.attention import Attention
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.query_decoder import QueryDecoder

B, D, H, P = 2, 8, 2, 4
GRID, N = (2, 3), 6
SPACE = synthetic_label_space(5, 2)


def draw(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def by_hand(attention, asks, keys, mask=None):
    """Return softmax(QKᵀ/√d) of every head in numpy, f64[B,H,Q,T]; queries [B,Q,D], keys [B,T,D], mask bool[Q,T].

    The projections are the layer's own, which test_query_head.py compares with torch.
    """
    parts = (attention.qkv(jnp.asarray(x))[..., part : part + D] for x, part in ((asks, 0), (keys, D)))
    queries, keys = (np.asarray(x, np.float64).reshape(*x.shape[:2], H, D // H) for x in parts)
    weights = np.exp(np.einsum("bqhd,bthd->bhqt", queries, keys) / np.sqrt(D / H)) * (1 if mask is None else mask)
    return weights / weights.sum(axis=-1, keepdims=True)


# -------------------------------------------------------------------------------------------------- of label queries
OPTIONS = {
    "dr_moe": {"decoder_layers": 1, "encoder_layers": 1},
    "q2l": {"decoder_layers": 2},
    "ml_decoder": {"decoder_layers": 1},
}
SMALL = {"width": D, "heads": H, "hidden": 6, "encoder_layers": 0, "dropout": 0.0}


def last_layer_by_hand(decoder, memory, positions, mask=None):
    """Return the weights [B,H,Q,T] of the last layer, after running the layers before it."""
    memory, queries = np.asarray(memory), np.asarray(decoder.queries)[None]
    keys = memory if positions is None else memory + np.asarray(positions)
    tokens, added = (np.zeros_like(queries), queries) if decoder.style.added_queries else (queries, None)
    for layer in decoder.layers[:-1]:
        tokens = jax.jit(lambda x, layer=layer: layer(x, added, memory, keys, mask=mask))(tokens)
    last = decoder.layers[-1]
    tokens, more = np.asarray(tokens), 0 if added is None else added
    if last.norm1 is not None:
        attended = (
            tokens
            if last.self_attn is None
            else np.asarray(jax.jit(lambda x: last.self_attn(x + more, x + more, x))(tokens))
        )
        tokens = np.asarray(last.norm1(tokens + attended))
    asks = np.broadcast_to(tokens + more, (B, *tokens.shape[1:]))
    return by_hand(last.cross_attn, asks, keys, mask=mask)


@pytest.mark.variants("kind")
@pytest.mark.parametrize("kind", OPTIONS)
def test_label_queries_against_softmax_by_hand(kind):
    options = {**SMALL, **OPTIONS[kind], "style": kind}
    decoder = drawn(lambda: QueryDecoder(D, 5, decoder_settings(**options), rngs=nnx.Rngs(0)))
    features = Features(None, None, draw(B, N, D), GRID)
    found, (memory, positions) = jax.jit(lambda f: (decoder.attention(f), decoder.encode(f.patches, f.grid)))(features)
    expected = last_layer_by_hand(decoder, memory, positions).mean(axis=1)
    np.testing.assert_allclose(found, expected, atol=5e-6)
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-5)


def test_remaining_attention_of_mlmoe_labels_is_on_the_prompts_of_their_groups():
    groups = {"co": [0, 1, 1]}
    settings = decoder_settings(**SMALL, decoder_layers=1)
    decoder = drawn(lambda: GroupTokenDecoder(D, groups, settings, groups=2, per_group=2, rngs=nnx.Rngs(0)))
    features = Features(None, draw(B, P, D, seed=2), draw(B, N, D), GRID)
    memory = np.concatenate([decoder.encode(features.patches, GRID)[0], features.prompts], axis=1)
    mask = np.concatenate([np.ones((3, N), bool), label_prompt_mask(groups, 2, 2)], axis=1)
    expected = last_layer_by_hand(decoder, memory, None, mask).mean(axis=1)
    found = jax.jit(lambda f: decoder.attention(f))(features)
    np.testing.assert_allclose(found, expected[..., :N], atol=5e-6)
    np.testing.assert_allclose(1 - found.sum(axis=-1), expected[..., N:].sum(axis=-1), atol=1e-5)


def test_labels_that_share_a_query_share_its_map():
    settings = decoder_settings(**SMALL, decoder_layers=1)
    decoder = lambda: QueryDecoder(D, 3, settings, rngs=nnx.Rngs(0))  # noqa: E731
    head = drawn(lambda: QueryHead(decoder(), 5, classifier="grouped", rngs=nnx.Rngs(0)))
    features = Features(None, None, draw(B, N, D), GRID)
    of_queries, of_labels = jax.jit(lambda f: (head.decoder.attention(f), head.attention(f)["labels"]))(features)
    # the classifier shows which labels a query belongs to
    weights = np.asarray(head.classifier(jnp.eye(3)[:, :, None] * jnp.ones(D))) - np.asarray(head.classifier.bias)
    assert (np.count_nonzero(weights, axis=0) == 1).all()
    np.testing.assert_array_equal(of_labels, np.asarray(of_queries)[:, np.abs(weights).argmax(axis=0)])


def test_cells_of_add_gcn_by_hand():
    head = drawn(lambda: ADDGCNHead(D, 5, hidden=4, rngs=nnx.Rngs(0)))
    patches = draw(B, N, D)
    weights = 1 / (1 + np.exp(-np.asarray(patches, np.float64) @ np.asarray(head.map_classifier.kernel)))
    expected = np.swapaxes(weights / weights.sum(axis=1, keepdims=True), 1, 2)
    np.testing.assert_allclose(head.attention(Features(None, None, patches, GRID))["labels"], expected, atol=1e-6)
    dark = head.attention(Features(None, None, -1e5 * jnp.abs(patches), GRID))["labels"]
    assert np.isfinite(dark).all()


def test_labels_attend_as_their_prompts_weighted_by_the_gates():
    config = load_config("mlvpt_digits", [])
    config.model.prompts.update({"num_groups": 2, "per_group": 3})
    head = drawn(lambda: head_class(config).from_config(config, D, SPACE, dtype=None, rngs=nnx.Rngs(0)), 0.5)
    prompts, attention = draw(B, 12, D), jax.nn.softmax(draw(B, 12, N, seed=2))
    features = Features(None, prompts, None, GRID, {"prompts": attention})
    found, gates = head.attention(features)["labels"], head(features).gates
    by_prompt = np.asarray(attention).reshape(B, 2, 3, 2, N)  # side, expert, group
    expected = np.zeros((B, 5, N))
    for number, side in enumerate(("co", "dc")):
        for label, group in enumerate(getattr(head, side).group_of):
            weights = np.asarray(gates[side])[:, label, :, None]
            expected[:, label] += (weights * by_prompt[:, number, :, group]).sum(axis=1) / 2
    np.testing.assert_allclose(found, expected, atol=1e-6)


# ------------------------------------------------------------------------------------------------- class activations
@pytest.fixture
def small_resnet(monkeypatch):
    entry = catalog.entry("resnet50")
    small = dataclasses.replace(entry.shape, blocks=(1,) * 4, stem=8)
    monkeypatch.setitem(catalog.CATALOG, "resnet50", dataclasses.replace(entry, shape=small))


def activation(reference, **changes):
    """A drawn model with its prediction with maps."""
    config = load_config(
        reference, override_pairs({"data.image_size": 64, "model.backbone.weights": "none", **changes})
    )
    model = drawn(lambda: build_model(config, SPACE, rngs=nnx.Rngs(0)), 0.3)
    image = draw(B, 64, 64, 3)
    return model, image, jax.jit(lambda x: model(x, return_attention=True))(image)


def test_the_activations_of_a_map_have_the_logits_as_their_mean(small_resnet):
    model, image, prediction = activation("linear_probe", **{"model.backbone.name": "resnet50"})
    assert prediction.map.shape == (B, 5, 2, 2)
    np.testing.assert_allclose(prediction.map.mean(axis=(2, 3)), prediction.logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(prediction.features, model.encode(image).cls, atol=1e-5)


@pytest.mark.parametrize("pool", ["cls", "patches", "mean"])
def test_the_activation_of_a_patch_is_the_logit_of_it_alone(tiny_vit, pool):
    model, image, prediction = activation("linear_probe:dataset=digits", **{"model.head.pool": pool})
    vit, head = model.backbone, model.head
    tokens, grid = vit.embed(image)
    for block in [*vit.blocks][:-1]:
        tokens = block(tokens)
    last, width = vit.blocks[-1], vit.shape.width
    if pool == "cls":
        value = last.attn.qkv(last.norm1(tokens[:, 1:]))[..., 2 * width :]  # weight 1 on the only key
        mixed = last.attn.proj(value)
        tokens = tokens[:, :1] + (last.ls1(mixed) if last.scaled else mixed)
        mixed = last.mlp(last.norm2(tokens))
        tokens = tokens + (last.ls2(mixed) if last.scaled else mixed)
    else:
        tokens = last(tokens)[:, 1:]
    logits = getattr(head, "patch_classifier" if pool == "patches" else "classifier")(vit.norm(tokens))
    expected = np.swapaxes(np.asarray(logits), 1, 2).reshape(B, 5, *grid)
    np.testing.assert_allclose(prediction.map, expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected, axis=(2, 3)).min() > 1e-3


# --------------------------------------------------------------------------------------------------- of whole models
K = 10
MAPS = {
    "linear_probe": {"cls": 1},
    "mlvpt_digits": {"prompts": 8, "labels": K},
    "mlmoe_dinov2": {"prompts": 8, "labels": K},
    "drmoe_resnet101": {"labels": K},
    "mlgcn_resnet101": {},
}


@functools.cache
def tiny(reference):
    """A method on a tiny ViT: (its structure, its abstract values)."""
    config = load_config(reference if reference == "mlvpt_digits" else f"{reference}:dataset=digits", [])
    config.model.prompts.update({"count": 3, "num_groups": 2, "per_group": 2})
    config.model.head.decoder.update({"heads": 2, "hidden": 8, "encoder_layers": 1, "decoder_layers": 1})
    space = synthetic_label_space(K, 2)
    definition, params, stats = ModelDef.split(nnx.eval_shape(lambda: build_model(config, space, rngs=nnx.Rngs(0))))
    return definition, {**params, **stats}


@pytest.mark.variants(reference=("mlvpt_digits", "mlmoe_dinov2"))
@pytest.mark.parametrize("reference", MAPS)
def test_every_method_returns_maps_of_the_features_that_its_head_reads(tiny_vit, reference):
    definition, values = tiny(reference)
    image = jax.ShapeDtypeStruct((B, 64, 64, 3), jnp.float32)
    prediction = jax.eval_shape(lambda v, x: definition.merge(v)(x, return_attention=True), values, image)
    assert {name: x.shape for name, x in prediction.attention.items()} == {
        name: (B, queries, 4) for name, queries in MAPS[reference].items()
    }
    assert prediction.grid == (2, 2)


def test_attention_maps_cost_nothing_if_not_requested(tiny_vit):
    """There is one softmax per block, encoder layer, decoder layer (two with self-attention) and gate, and no other."""
    definition, values = tiny("mlmoe_dinov2")
    image = jax.ShapeDtypeStruct((B, 64, 64, 3), jnp.float32)

    def predicted(explain):
        traced, made = jax.make_jaxpr(lambda v, x: definition.merge(v)(x, return_attention=explain), return_shape=True)(
            values, image
        )
        return calls(without_dead_code(traced.jaxpr), "exp"), made

    count, prediction = predicted(False)
    assert count == 2 + 1 + 2 + 1
    assert (prediction.attention, prediction.grid) == ({}, None)
    # The last block and the layers up to the last cross-attention again, which XLA merges with those above. It leaves
    # out the recorded weights that nobody reads.
    assert predicted(True)[0] == count + 1 + 1 + 2


@pytest.mark.slow
def test_a_small_change_of_a_learned_temperature_shows_in_bfloat16():
    """Rounded to bfloat16, 1.0038 would be 1."""
    attention = Attention(64, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = 8 * jax.random.normal(jax.random.key(0), (1, 30, 64))
    one, more = (attention(x, temperature=jnp.array(number)) for number in (1.0, 1.0038))
    np.testing.assert_array_equal(one, attention(x))
    assert (one != more).any()
