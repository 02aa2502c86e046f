"""LoRA, DoRA, BitFit, SSF and AdaptFormer: formulas, merged weights, settings. PEFT: pretrained/test_peft.py."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.prompts import make_prompts

from mlmoe_jax.config import default_config, from_json, load_config, set_key, to_json, use_adapter, validate
from mlmoe_jax.config.table import KEYS
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.adapter_merge import layer_weights, merge_adapters
from mlmoe_jax.models.adapters.catalog import ADAPTERS, LINEAR_LAYERS, describe_adapters
from mlmoe_jax.models.adapters.prompts import DeepPrompts
from mlmoe_jax.models.backbones.catalog import entry
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.layers.deltas import LayerCall
from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.models.params import named_variables
from mlmoe_jax.runs.assemble import abstract_parts

TINY = {"width": 16, "depth": 2, "heads": 2, "patch": 8, "native": 16}
SHAPES = {
    "dinov2": ViTShape(**TINY, layer_scale=0.5, mask_token=True),
    "dinov3": ViTShape(**TINY, mlp="swiglu", rotary_base=100.0, registers=2, key_bias=False),
    "clip": ViTShape(**TINY, mlp="quick_gelu", patch_bias=False, pre_norm=True),
    "siglip": ViTShape(**TINY, mlp="gelu_tanh", class_token=False),
}


def new_adapter(name, shape=SHAPES["dinov2"], **settings):
    config = default_config()
    use_adapter(config, name, **settings)
    return ADAPTERS[name].from_config(config.model.adapters[name], shape, dtype=None, rngs=nnx.Rngs(0))


def adapter_of(name, shape=SHAPES["dinov2"], **settings):
    """An adapter with random values."""
    return drawn(lambda: new_adapter(name, shape, **settings), 0.2, 5, ones=True)


def vit_of(shape=SHAPES["dinov2"]):
    return drawn(lambda: ViT(shape, rngs=nnx.Rngs(0)), 0.2, 1, ones=True)


def image(seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 16, 16, 3)), jnp.float32)


def close(ours, theirs, atol=2e-5):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=atol)


# ------------------------------------------------------------------------------------------------------------ formulas
def test_dora_sets_the_length_of_each_column():
    """DoRA, eq. 5, in numpy: the columns of the whole kernel have the learned lengths."""
    vit, adapter = vit_of(), adapter_of("dora", rank=3, alpha=6.0, targets=("key", "fc1"))
    kernel, bias = map(np.asarray, layer_weights(vit, "blocks/1/key"))
    a, b, change = (np.asarray(getattr(adapter.key, part)[1]) for part in ("a", "b", "magnitude"))
    moved = kernel + 2 * a @ b
    whole = (np.linalg.norm(kernel, axis=0) + change) * moved / np.linalg.norm(moved, axis=0)
    x = np.random.default_rng(5).normal(size=(2, 5, 16)).astype(np.float32)
    call = LayerCall(x, x @ kernel + bias, lambda: (kernel, bias))
    close(call.output + jax.jit(lambda: adapter.deltas()["blocks/1/key"](call))(), x @ whole + bias)


@pytest.mark.parametrize("name", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_dropout_is_only_for_training_and_drops_inputs(name):
    """DoRA computes everything from dropped inputs."""
    vit, adapter = vit_of(), adapter_of(name, rank=2, targets=("query", "value"), dropout=0.5)
    identity = jnp.eye(16)[None]

    def outputs():
        """Return the deltas of queries and of values; row i has input i alone."""
        found = []
        for path in ("blocks/0/query", "blocks/0/value"):
            kernel, bias = layer_weights(vit, path)
            call = LayerCall(identity, identity @ kernel + bias, lambda weights=(kernel, bias): weights)
            found.append(adapter.deltas(rngs=nnx.Rngs(1))[path](call)[0])
        return jnp.stack(found)

    plain = jax.jit(lambda: outputs())()
    adapter.train()
    query, value = np.asarray(jax.jit(lambda: outputs())() / plain)
    assert set(np.round([query, value], 3).ravel()) == {0, 2}
    assert not np.array_equal(query, value)


def test_bitfit_and_ssf_scale_and_shift_outputs():
    y = image().reshape(1, -1, 16)
    bitfit, ssf = adapter_of("bitfit"), adapter_of("ssf")
    call = LayerCall(y, y, None)
    close(bitfit.deltas()["blocks/1/norm2"](call), np.broadcast_to(bitfit.norm2.bias[1], y.shape))
    close(y + ssf.deltas()["blocks/1/norm2"](call), ssf.norm2.scale[1] * y + ssf.norm2.shift[1])


def test_the_factor_of_rank_stabilized_updates():
    """2 / √4 instead of 2 / 4."""
    x = image().reshape(1, -1, 16)
    plain, stable = (adapter_of("lora", rank=4, alpha=2.0, rank_stabilized=is_stable) for is_stable in (False, True))
    plain, stable = (adapter.deltas()["blocks/1/query"](LayerCall(x, x, None)) for adapter in (plain, stable))
    close(stable, 2 * plain)


@pytest.mark.parametrize("source", ["normed", "residual"])
def test_a_bottleneck_is_beside_the_mlp(source):
    """Block by block (AdaptFormer, sec. 3.2)."""
    vit, adapter = vit_of(), adapter_of("adaptformer", bottleneck=5, scale=0.3, input=source)

    @jax.jit
    def run(image):
        tokens, _ = vit.embed(image)
        for index, block in enumerate(vit.blocks):
            tokens = tokens + block.ls1(block.attn(block.norm1(tokens)))
            normed = block.norm2(tokens)
            x = normed if source == "normed" else tokens
            hidden = jnp.maximum(x @ adapter.down[index] + adapter.down_bias[index], 0)
            beside = 0.3 * (hidden @ adapter.up[index] + adapter.up_bias[index])
            tokens = tokens + block.ls2(block.mlp(normed)) + beside
        return tokens[:, 1:], vit(image, read=("patches",), norm=False, deltas=adapter.deltas()).patches

    by_hand, patches = run(image())
    close(patches, by_hand, 1e-4)


@pytest.mark.slow
def test_dropout_of_a_bottleneck_drops_hidden_entries():
    adapter = adapter_of("adaptformer", bottleneck=64, dropout=0.5)
    adapter.up[...] = jnp.eye(64)[None, :, :16].repeat(2, axis=0)
    adapter.up_bias[...] = jnp.zeros((2, 16))
    adapter.train()
    x = image().reshape(1, -1, 16)
    one, other = (adapter.deltas(rngs=nnx.Rngs(3))[f"blocks/{block}/mlp"](LayerCall(x, x, None)) for block in (0, 1))
    assert 0.6 < (np.asarray(one) == 0).mean() < 0.9, "of the half that passes the ReLU, half is dropped"
    assert not np.array_equal(one == 0, other == 0)


@pytest.mark.parametrize("name", ["lora", "dora", "bitfit", "adaptformer"])
def test_a_new_adapter_changes_nothing_bit_for_bit(name):
    vit, x = vit_of(), image().reshape(1, -1, 16)
    narrow = {"targets": ("query", "norm1")} if name == "bitfit" else {}
    for path, delta in new_adapter(name, **narrow).deltas().items():
        weights = (lambda: layer_weights(vit, path)) if name == "dora" else None  # noqa: B023
        output = x @ weights()[0] + weights()[1] if weights else x
        assert not np.any(delta(LayerCall(x, output, weights))), path


def test_initial_values_are_those_of_the_authors_code():
    a = new_adapter("lora", targets=LINEAR_LAYERS).query.a[...]
    assert 0.9 / 4 < np.abs(a).max() <= 1 / 4, "uniform"
    ssf = new_adapter("ssf", ViTShape(256, 4, 4, 8, 16))
    for vectors, mean in ((ssf.fc1.scale, 1), (ssf.fc1.shift, 0)):
        close([np.mean(vectors[...]), np.std(vectors[...])], [mean, 0.02], 2e-3)


def test_what_has_no_bias_is_not_tuned_by_bitfit():
    assert "key" not in adapter_of("bitfit", SHAPES["dinov3"]).targets
    assert "patch_embed" not in adapter_of("bitfit", SHAPES["clip"]).targets
    assert "norm_pre" in adapter_of("bitfit", SHAPES["clip"]).targets
    assert adapter_of("ssf", SHAPES["clip"], targets=("norm_pre", "key")).targets == ("norm_pre", "key")


# -------------------------------------------------------------------------------------------------------------- merged
def classifier(shape, *adapters):
    prompts = drawn(lambda: make_prompts(DeepPrompts, shape, nnx.Rngs(0), count=3), 1.0, 4)
    head = drawn(lambda: LinearHead(shape.width, 3, pool="both", rngs=nnx.Rngs(0)), 0.2, 9)
    return Classifier(vit_of(shape), prompts, head, final_norm=True, precision="highest", adapters=dict(adapters))


@jax.jit
def predicted(model):
    prediction = model(image(), return_attention=True)
    return jax.nn.sigmoid(prediction.logits), prediction.attention["cls"]


@pytest.mark.variants(kind=("dinov2",))
@pytest.mark.parametrize(
    ("kind", "names"), [("dinov2", ("lora", "dora", "bitfit", "ssf")), ("dinov3", ("lora", "dora", "bitfit"))]
)
def test_merged_equals_unmerged(kind, names):
    """Beside prompts, which provide keys and values only."""
    shape = SHAPES[kind]
    targets = {"lora": {"targets": LINEAR_LAYERS}, "dora": {"targets": LINEAR_LAYERS}}
    model = classifier(shape, *((name, adapter_of(name, shape, **targets.get(name, {}))) for name in names))
    before = predicted(model)
    merged = merge_adapters(model)
    assert not any(path.startswith("adapters/") for path in named_variables(merged))
    for ours, expected in zip(predicted(merged), before, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)
    assert len(model.adapters) == len(names), "the given model stays"
    moved = (layer_weights(m.backbone, "blocks/1/query")[0] for m in (merged, model))
    assert np.abs(np.subtract(*moved)).max() > 1e-2


# ------------------------------------------------------------------------------------------------- a method's model
@pytest.mark.slow
def test_a_recomputed_block_has_the_same_gradient():
    """With dropout: the blocks that are computed again in the backward pass drop the same entries."""
    gradients = []
    for remat in (False, True):
        vit = vit_of()
        vit.remat = remat
        structure, state = nnx.split(adapter_of("lora", rank=2, dropout=0.5))

        def loss(state, vit=vit, structure=structure):
            adapter = nnx.merge(structure, state)
            adapter.train()
            return vit(image(), deltas=adapter.deltas(rngs=nnx.Rngs(3))).cls.sum()

        gradients.append(jax.jit(jax.grad(loss))(state))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *gradients)


@pytest.mark.usefixtures("tiny_vit")
def test_frozen_kernels_get_no_gradient():
    """The backward pass has the products of the forward pass, for inputs, and small ones, but none for kernels."""
    parts = abstract_parts(load_config("lora:dataset=digits", []), synthetic_label_space(10, 1))
    given = parts.trainable, parts.frozen, jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)

    def loss(trainable, frozen, image):
        return parts.definition.merge(trainable, frozen)(image).logits.sum()

    forward, backward = (count_macs(jax.make_jaxpr(function)(*given).jaxpr) for function in (loss, jax.grad(loss)))
    assert backward < 2.4 * forward, "with gradients of all kernels it would be three times"


# ------------------------------------------------------------------------------------------------------------- configs
# Of a ViT-B/16: parameters, and multiply-adds per token.
COUNTS = {
    "lora": (294_912, 294_912),
    "dora": (294_912 + 12 * 2 * 768, 294_912),
    "bitfit": (102_912, 0),  # biases are counted with their layers
    "ssf": (205_824, 102_912),  # the 0.205 million of the paper
    "adaptformer": (1_189_632, 12 * 2 * 64 * 768),  # the 1.19 million of the paper
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_of_the_papers_and_multiply_adds_are_counted(name):
    adapter = nnx.eval_shape(lambda: new_adapter(name, entry("vit_b16_in21k").shape))
    parameters = sum(variable.size for _, variable in named_variables(adapter).values())
    assert (parameters, adapter.macs(197)) == (COUNTS[name][0], 197 * COUNTS[name][1])


def test_a_config_with_an_adapter_is_stored_and_read():
    config = load_config("lora:rank=4,targets=query+key,alpha=2,dataset=digits", [])
    validate(config)
    settings = config.model.adapters.lora
    assert (settings.rank, settings.targets, settings.alpha, settings.dropout) == (4, ("query", "key"), 2.0, 0.0)
    assert from_json(to_json(config)).to_dict() == config.to_dict()
    stored = json.loads(to_json(config))
    del stored["model"]["adapters"]["lora"]["dropout"]  # a setting that is newer than the run
    assert from_json(json.dumps(stored)).model.adapters.lora.dropout == 0
    del stored["model"]["adapters"]
    assert not from_json(json.dumps(stored)).model.adapters


def test_one_key_adds_an_adapter_with_the_defaults_of_the_others():
    config = load_config("vpt:dataset=digits", [("model.adapters.lora.rank", "2")])
    assert config.model.adapters.lora.targets == ("query", "value")
    set_key(config, "model.adapters", "lora", role="key")
    assert config.model.adapters.lora.rank == 2
    use_adapter(config, "lora", alpha=1.0)
    assert (config.model.adapters.lora.rank, config.model.adapters.lora.alpha) == (2, 1.0)
    assert describe_adapters(config) == "deep prompts and LoRA (rank 2; query, value)"
    assert KEYS["model.adapters.lora.rank"].allowed == "an integer of at least 1 and at most 4,096"
