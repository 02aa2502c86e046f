"""Initial values have the authors' distributions, are those of the whole model, and only missing ones are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.prompts import make_prompts
from helpers.query_heads import decoder_settings

from mlmoe_jax.config import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.adapters.prompts import PrunablePrompts
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.build import build_model
from mlmoe_jax.models.experts import LabelExperts
from mlmoe_jax.models.heads.gcn import ADDGCNHead, MLGCNHead
from mlmoe_jax.models.heads.query import GroupedClassifier
from mlmoe_jax.models.layers.initializers import Constant
from mlmoe_jax.models.params import ModelDef, draw_missing
from mlmoe_jax.models.query_decoder import QueryDecoder

ROUTING = {"expert": "ffn", "expert_hidden": 6, "shared_experts": 0, "task_experts": 3}
FUSED = (6 / (4 * 64)) ** 0.5  # torch draws queries, keys and values as one matrix
GRAPH = Constant(np.ones((6, 12), np.float32)), Constant(np.eye(6, dtype=np.float32))


def ml_vpt(rngs):
    config = load_config("mlvpt_digits", [("model.prompts.num_groups", "4")])
    return build_model(config, synthetic_label_space(10, 4), rngs=rngs)


def decoder(rngs, **options):
    settings = decoder_settings(width=64, hidden=96, encoder_layers=1, decoder_layers=1, **options)
    return QueryDecoder(32, 50, settings, rngs=rngs)


# (module, {path: largest value of a uniform distribution around 0})
UNIFORM = {
    "ML-VPT": (
        ml_vpt,
        {
            "prompts/deep": (6 / (3 * 8 * 8 + 128)) ** 0.5,
            **dict.fromkeys(("head/bank/up/kernel", "head/bank/up/bias"), 128**-0.5),
            **dict.fromkeys(("head/bank/down/kernel", "head/bank/down/bias"), 5**-0.5),
            **dict.fromkeys(("head/co/gate/kernel", "head/dc/classifier/kernel"), 128**-0.5),
        },
    ),
    "DR-MoE's decoder": (
        decoder,
        {
            **dict.fromkeys(("project/kernel", "project/bias"), 32**-0.5),
            "layers/0/cross_attn/qkv/kernel": FUSED,
            "layers/0/cross_attn/proj/kernel": (6 / (2 * 64)) ** 0.5,
            **dict.fromkeys(("encoder/0/mlp/fc1/kernel", "encoder/0/mlp/fc2/kernel"), (6 / (64 + 96)) ** 0.5),
            "encoder/0/mlp/fc1/bias": 64**-0.5,
            "layers/0/mlp/fc2/bias": 96**-0.5,
            **dict.fromkeys(("layers/0/self_attn/qkv/bias", "layers/0/self_attn/proj/bias"), 0),
        },
    ),
    "ML-Decoder's decoder": (
        lambda rngs: decoder(rngs, style="ml_decoder"),
        {
            **dict.fromkeys(("project/kernel", "project/bias"), 32**-0.5),
            "layers/0/cross_attn/qkv/kernel": FUSED,
            **dict.fromkeys(("layers/0/cross_attn/proj/kernel", "encoder/0/mlp/fc1/kernel"), 64**-0.5),
            "encoder/0/mlp/fc2/kernel": 96**-0.5,
            "encoder/0/mlp/fc1/bias": 64**-0.5,
            "layers/0/mlp/fc2/bias": 96**-0.5,
        },
    ),
    "a classifier": (
        lambda rngs: GroupedClassifier(64, 40, 79, init="uniform", rngs=rngs),
        {"kernel": 64**-0.5, "bias": 64**-0.5},
    ),
    "experts": (
        lambda rngs: LabelExperts(12, 5, ROUTING, rngs=rngs),
        {"task/up/kernel": 12**-0.5, "task/down/kernel": 6**-0.5},
    ),
    "ML-GCN": (
        lambda rngs: MLGCNHead(32, *GRAPH, hidden=24, rngs=rngs),
        {"gc1/kernel": 24**-0.5, "gc2/kernel": 32**-0.5},
    ),
    "ADD-GCN": (
        lambda rngs: ADDGCNHead(32, 6, hidden=24, rngs=rngs),
        {"graph/relation/kernel": 48**-0.5, "transform/bias": 32**-0.5},
    ),
    "E2VPT": (
        lambda rngs: make_prompts(PrunablePrompts, ViTShape(768, 12, 12, 16, 224), rngs, count=0, key_values=5),
        {"key_value": 0.136931},
    ),
}
LARGE = ("ML-VPT", "DR-MoE's decoder", "ML-Decoder's decoder")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in UNIFORM])
def test_uniform_initial_values_have_the_authors_bounds(name):
    build, bounds = UNIFORM[name]

    @jax.jit  # values that are not returned are not computed
    def draw():
        rngs = nnx.Rngs(jax.random.key(0, impl="unsafe_rbg"))  # compiles faster than the default generator
        params = ModelDef.split(build(rngs))[1]
        return {path: params[path] for path in bounds}

    for path, values in draw().items():
        bound = bounds[path] * (1 + 1e-6)
        assert max(0.85, 1 - 12 / values.size) * bound <= np.abs(values).max() <= bound, path
        assert abs(values.mean()) <= 0.3 * bound, path
        if "bank" in path or "task" in path:
            experts = values.reshape(-1, *values.shape[-2:]) if values.ndim > 2 else values
            assert len(np.unique(experts, axis=0)) == len(experts), f"{path} of each expert"


@pytest.mark.slow
def test_normal_initial_values_have_the_authors_deviations():
    rngs = nnx.Rngs(jax.random.key(0, impl="unsafe_rbg"))
    for module in (decoder(rngs), decoder(rngs, style="ml_decoder")):
        assert np.asarray(module.queries).std() == pytest.approx(1, rel=0.05)
    xavier = GroupedClassifier(64, 40, 79, init="xavier", rngs=rngs)
    assert np.asarray(xavier.kernel).std() == pytest.approx(np.sqrt(2 / ((64 + 40) * 2)), rel=0.03)
    assert not np.any(xavier.bias)


def values(module: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(module))
    return {"/".join(map(str, path)): variable.get_value() for path, variable in state}


def same_bits(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        assert (ours[path].dtype, ours[path].weak_type) == (value.dtype, value.weak_type), path
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


class Pair(nnx.Module):
    """A linear layer, and a value that counts how often it is computed."""

    def __init__(self, computed: list, rngs: nnx.Rngs):
        def counted() -> np.ndarray:
            computed.append(1)
            return np.float32([1, 2])

        self.counted = nnx.Param(jax.pure_callback(counted, jax.ShapeDtypeStruct((2,), jnp.float32)) * 2)
        self.linear = nnx.Linear(3, 4, rngs=rngs)


def test_only_values_that_are_missing_are_computed():
    computed: list[int] = []

    def build() -> Pair:
        return Pair(computed, nnx.Rngs(3))

    whole, pair = values(build()), nnx.eval_shape(build)
    del computed[:]
    draw_missing(pair, build, drawable=("linear/kernel",))
    assert isinstance(pair.linear.bias.get_value(), jax.ShapeDtypeStruct)
    np.testing.assert_array_equal(pair.linear.kernel[...], whole["linear/kernel"])
    nnx.update(pair, nnx.from_flat_state({("linear", "bias"): nnx.Param(jnp.full(4, 7.0))}))  # as from a file
    pair.counted.set_value(jnp.zeros(2))
    draw_missing(pair, build)
    same_bits(values(pair), {**whole, "linear/bias": jnp.full(4, 7.0), "counted": jnp.zeros(2)})
    assert not computed

    again = nnx.eval_shape(build)
    draw_missing(again, build)
    same_bits(values(again), whole)
    assert computed == [1]
