"""DR-MoE's head against its equations one label and one expert at a time, its named settings, and its counts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.programs import calls
from helpers.query_heads import decoder_settings

from mlmoe_jax.config import default_config
from mlmoe_jax.models.experts import EXPERTS, Gates, LabelExperts, gate_entropy
from mlmoe_jax.models.heads.dr_moe import SETTINGS, RoutedExpertsHead, entropy_penalty
from mlmoe_jax.models.macs import forward_macs
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.query_decoder import QueryDecoder

B, K, D = 4, 5, 12
DEFAULTS = default_config().model.head.routing.to_dict()
SMALL = {"expert_hidden": 6, "gate_hidden": 7, "shared_experts": 3, "task_experts": 2}


class Given(nnx.Module):
    """A stand-in for a decoder: the patches are the label features."""

    read = ("patches",)

    def __init__(self):
        self.dropout = nnx.Dropout(0.5, deterministic=True)

    def __call__(self, features, *, rngs=None):
        return self.dropout(features.patches, rngs=rngs)


def make_head(labels=K, decoder=None, **options):
    routing = {**DEFAULTS, **SMALL, **options}
    settings = {name: routing.pop(name) for name in ("entropy_weight", "pooled") if name in routing}
    return RoutedExpertsHead(decoder or Given(), D, labels, routing, **settings, rngs=nnx.Rngs(0))


def drawn(seed=9, decoder=Given, **options):
    """Return the structure of a head, and random values for its parameters, including static gates."""
    definition, params, _ = ModelDef.split(nnx.eval_shape(lambda: make_head(decoder=decoder(), **options)))
    draw = np.random.default_rng(seed)
    return definition, {
        path: draw.normal(0, 0.4, value.shape).astype(np.float32) for path, value in sorted(params.items())
    }


@pytest.fixture(scope="module")
def features():
    return label_features(np.random.default_rng(5).normal(size=(B, K, D)).astype(np.float32))


def label_features(values):
    return Features(None, None, values, (1, K))


def head_by_loops(params, h, options):
    """Return logits, routing weights and entropy per image in float64 numpy, from the definitions."""
    p = {path: np.asarray(value, np.float64) for path, value in params.items()}
    shared, task = SMALL["shared_experts"], SMALL["task_experts"]

    def layer(name, x, at):
        return x @ p[f"{name}/kernel"][at] + p[f"{name}/bias"][at]

    def expert(bank, x, at):
        if options["expert"] == "relu_linear":
            return np.maximum(layer(f"{bank}/linear", x, at), 0)
        worked = layer(f"{bank}/down", np.maximum(layer(f"{bank}/up", x, at), 0), at)
        return np.maximum(worked, 0) if options["expert"] == "ffn_relu" else worked

    def gate(x, k):
        own = options["gate_share"] == "per_label"
        if options["gate"] == "static":
            return p["gates/free_logits"][k if own else 0]
        at = k if own else ...
        if options["gate"] == "mlp":
            x = np.maximum(layer("gates/net/hidden", x, at), 0)
        return layer("gates/net/logits", x, at)

    images = len(h)
    logits, gates, entropy = np.zeros((images, K)), np.zeros((images, K, shared + task)), np.zeros(images)
    for b, k in itertools.product(range(images), range(K)):
        x, score = h[b, k], np.exp(gate(h[b, k], k))
        w = gates[b, k] = score / score.sum()
        mixed = sum(w[s] * expert("experts/shared", x, s) for s in range(shared))
        mixed = mixed + sum(w[shared + t] * expert("experts/task", x, (k, t)) for t in range(task))
        row = k if options["classifier"] == "per_label" else 0
        logits[b, k] = p["classifier/kernel"][row] @ mixed + p["classifier/bias"][row]
        entropy[b] -= (w * np.log(w)).sum() / K
    return logits, gates, entropy


def difference(ours, theirs):
    return np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()


@pytest.mark.variants("share")
@pytest.mark.parametrize("share", ["per_label", "shared"])
@pytest.mark.parametrize("gate", ["static", "linear", "mlp"])
@pytest.mark.parametrize("expert", EXPERTS)
def test_head_is_its_equations(features, expert, gate, share):
    options = {"expert": expert, "gate": gate, "gate_share": share, "classifier": share}
    definition, params = drawn(**options, entropy_weight=0.5)
    prediction = jax.jit(lambda params: definition.merge(params)(features))(params)
    logits, gates, entropy = head_by_loops(params, np.asarray(features.patches, np.float64), options)
    assert difference(prediction.logits, logits) < 2e-5
    assert prediction.gates["experts"].shape == (1 if gate == "static" else B, K, 5)
    assert difference(np.broadcast_to(prediction.gates["experts"], gates.shape), gates) < 2e-5
    assert prediction.penalties["entropy"].shape == (B,)
    assert difference(prediction.penalties["entropy"], -0.5 * entropy) < 2e-5
    apart = np.abs(prediction.gates["experts"][0] - prediction.gates["experts"][-1]).max()
    assert apart == 0 if gate == "static" else apart > 1e-3


@pytest.mark.variants("settings")
@pytest.mark.parametrize("settings", ["recommended", "static", "hsq"])
def test_gradients_reach_every_parameter(features, settings):
    definition, params = drawn(**{**SETTINGS[settings], **SMALL})
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(definition.merge(params)(features).logits ** 2)))(params)
    for path, slope in gradient.items():
        assert np.abs(slope).max() > 0, path
        if path.startswith(("experts/task", "gates")):
            assert (np.abs(slope).reshape(K, -1).max(1) > 0).all(), f"{path} of every label"


def test_static_gates_start_equal(features):
    gates = Gates(D, K, 4, DEFAULTS | {"gate": "static"}, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(gates(features.patches), np.full((1, K, 4), 1 / 4), rtol=1e-6)


def test_a_bank_is_one_matrix_product_per_layer(features):
    """One for the shared bank and one for the task bank, for all sizes."""
    routing = {**DEFAULTS, **SMALL, "expert": "ffn"}
    experts = lambda: LabelExperts(D, K, routing, rngs=nnx.Rngs(0))  # noqa: E731
    gates = lambda: Gates(D, K, 4, routing, rngs=nnx.Rngs(0))  # noqa: E731
    for build, products in ((experts, 4), (gates, 2)):
        definition, params, _ = ModelDef.split(nnx.eval_shape(build))
        program = jax.make_jaxpr(lambda params, d=definition: d.merge(params)(features.patches))(params)
        assert calls(program.jaxpr, "dot_general") == products


# -------------------------------------------------------------------------------------------------------- entropy
def test_entropy_of_two_gates(features):
    scores = np.exp(np.array([[0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]], np.float32))
    gates = scores / scores.sum(1, keepdims=True)
    np.testing.assert_allclose(gate_entropy(gates), [1.6094379124, 0.9999728283], rtol=1e-6)
    mean = (1.6094379124 + 0.9999728283) / 2
    np.testing.assert_allclose(entropy_penalty(gates[None], "paper", 0.01), [0.01 * mean], rtol=1e-6)
    np.testing.assert_allclose(entropy_penalty(gates[None], "maximize", 0.01), [-0.01 * mean], rtol=1e-6)
    definition, params = drawn(entropy="off")
    assert jax.eval_shape(lambda params: definition.merge(params)(features), params).penalties == {}


# ------------------------------------------------------------------------------------------------ settings, counts
def dr_moe(labels):
    def build():
        decoder = QueryDecoder(2048, labels, decoder_settings(), rngs=nnx.Rngs(0))
        return RoutedExpertsHead(decoder, 512, labels, DEFAULTS | SETTINGS["literal"], rngs=nnx.Rngs(0))

    return nnx.eval_shape(build)


def rows(module):
    """Number of parameters of each part of a module, and of all."""
    counts = {}
    for path, value in ModelDef.split(module)[1].items():
        parts = path.split("/")
        for name in ("", parts[0], "/".join(parts[:2])):
            counts[name] = counts.get(name, 0) + value.size
    return counts


RESNET_101 = 42_500_160  # parameters of the body


def test_parameters_of_dr_moe_per_part():
    counts = rows(dr_moe(80))
    assert counts["decoder/project"] == 1_049_088
    assert counts["decoder/queries"] == 80 * 512
    assert counts["decoder/encoder"] == 6_304_768
    assert counts["decoder/layers"] + counts["decoder/norm"] == 8_409_088
    assert counts["experts/shared"] == 525_312
    assert counts["experts/task"] == 80 * 131_328
    assert counts["gates"] == 80 * 132_613
    assert counts["classifier"] == 257
    assert RESNET_101 + counts[""] == 79_944_913


def test_macs_as_published_and_as_executed():
    head, patches = dr_moe(80), jax.ShapeDtypeStruct((1, 196, 2048), jnp.float32)
    layers, extra = head.published_macs(196, forward_macs(head, Features(None, None, patches, (14, 14)))[0])
    assert layers == head.decoder.layer_macs(196) + 20_480
    attention = 2 * 512 * (2 * 196**2 + 2 * (80 * 196 + 80**2))
    assert extra == attention + 52_428_800 + 10_588_160, "experts and gates"
    norms = head.norm_macs(196)
    assert norms == 4 * 512 * (2 * 2 * 196 + (2 * 3 + 1) * 80)
    assert layers + extra - norms == 33_615_732_736 - 31_197_429_760, "DR-MoE at 448 pixels without its ResNet-101"
