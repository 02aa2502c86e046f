"""Queries that are computed from the vectors of the label names, in every head with queries."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.name_vectors import drawn_vectors

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.partition import LABEL

D, K, GROUPS, PER_GROUP, NAME_WIDTH = 16, 5, 2, 3, 7
SHARED = {"routing.classifier": "shared", "routing.gate_share": "shared", "routing.task_experts": 0}
# name -> kind of head, kind of prompts, and settings
HEADS = {
    "Q2L": ("query", "none", {"decoder.style": "q2l"}),
    "ML-Decoder": ("query", "none", {"decoder.style": "ml_decoder"}),
    "MLMoE": ("routed_experts", "group", {}),
    "shared experts": ("routed_experts", "none", {"decoder.style": "independent", **SHARED}),
}


def normal(shape, seed) -> np.ndarray:
    return (0.3 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def config_of(kind, prompts, settings):
    config = default_config()
    head = config.model.head
    head.kind, head.names, config.model.prompts.kind = kind, "labels.safetensors", prompts
    config.model.prompts.num_groups, config.model.prompts.per_group = GROUPS, PER_GROUP
    head.decoder.update({"width": D, "heads": 4, "hidden": 12, "encoder_layers": 0, "decoder_layers": 1})
    head.routing.update({"expert_hidden": 9, "gate_hidden": 10})
    for key, value in settings.items():
        section, leaf = key.split(".")
        head[section][leaf] = value
    return config


def space_of(labels: int, vectors=None) -> LabelSpace:
    """Return K labels with vectors, the first of which do not depend on K."""
    space = synthetic_label_space(labels, GROUPS)
    vectors = vectors or drawn_vectors(synthetic_label_space(9, 1).names, NAME_WIDTH)
    return replace(space, name_vectors=replace(vectors, names=space.names, vectors=vectors.vectors[:labels]))


def split_head(name: str, space: LabelSpace):
    """Return the structure, the parameters and the statistics of a head, without computing initial values."""
    config = config_of(*HEADS[name])
    build = lambda: head_class(config).from_config(config, D, space, dtype=None, rngs=nnx.Rngs(0))  # noqa: E731
    return ModelDef.split(nnx.eval_shape(build))


def drawn_head(name: str, labels: int = K):
    """Return the structure of a head, and drawn values, equal for any number of labels where their shapes are."""
    definition, params, _ = split_head(name, space_of(labels))
    return definition, {path: normal(value.shape, sum(map(ord, path))) for path, value in params.items()}


def features() -> Features:
    patches, prompts = normal((2, 6, D), 1), normal((2, 2 * GROUPS * PER_GROUP, D), 2)
    return Features(None, jnp.asarray(prompts), jnp.asarray(patches), (2, 3))


@partial(jax.jit, static_argnums=0)
def logits_of(definition, values):
    return definition.merge(values)(features()).logits


@partial(jax.jit, static_argnums=0)
def queries_of(definition, values):
    return definition.merge(values).decoder.name_queries()


def test_queries_are_projected_vectors():
    definition, values = drawn_head("Q2L")
    kernel, bias = (values[f"decoder/name_queries/projection/{part}"] for part in ("kernel", "bias"))
    vectors = space_of(K).name_vectors.vectors * np.sqrt(NAME_WIDTH)
    expected = np.maximum(vectors @ kernel + bias, 0)
    np.testing.assert_allclose(queries_of(definition, values), expected, rtol=2e-5, atol=2e-6)
    assert (expected > 0).any()


@pytest.mark.variants(name=("Q2L", "MLMoE"))
@pytest.mark.parametrize("name", HEADS)
def test_a_head_computes_what_it_does_with_learned_queries_of_these_values(name):
    definition, values = drawn_head(name)
    assert "decoder/queries" not in values
    learned, params, _ = split_head(name, replace(space_of(K), name_vectors=None))
    given = {path: values.get(path) for path in params} | {"decoder/queries": queries_of(definition, values)}
    if HEADS[name][0] == "query":  # the one classifier of all labels, as one per label
        weights, bias = values["classifier/kernel"], values["classifier/bias"]
        given["classifier/kernel"] = np.repeat(weights[:, :, None], K, axis=0)
        given["classifier/bias"] = np.repeat(bias, K)
    np.testing.assert_allclose(logits_of(definition, values), logits_of(learned, given), rtol=2e-5, atol=2e-5)


def test_the_projection_learns_and_the_vectors_do_not():
    definition, values = drawn_head("ML-Decoder")
    slopes = jax.jit(jax.grad(lambda values: jnp.sum(logits_of(definition, values) ** 2)))(values)
    assert np.abs(slopes["decoder/name_queries/projection/kernel"]).max() > 1e-6
    assert not any("vectors" in path for path in values)


@pytest.mark.parametrize("name", ["ML-Decoder", "shared experts"])
def test_a_further_name_changes_no_score_of_the_others(name):
    definition, values = drawn_head(name)
    more, more_values = drawn_head(name, K + 2)
    assert {path: value.shape for path, value in more_values.items()} == {p: v.shape for p, v in values.items()}
    assert not any(LABEL in axes for axes in more.axes().values())
    logits, further = logits_of(definition, values), logits_of(more, more_values)
    assert further.shape == (2, K + 2)
    np.testing.assert_allclose(further[:, :K], logits, rtol=2e-6, atol=2e-6)
    assert np.abs(further[:, K] - further[:, K + 1]).min() > 1e-4
