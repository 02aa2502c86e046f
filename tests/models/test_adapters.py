"""DoRA, BitFit, SSF and AdaptFormer against their formulas, alone and together, and merged into the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn

from mlmoe_jax.config import default_config, load_config, use_adapter, validate
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.adapter_merge import layer_weights, merge_adapters
from mlmoe_jax.models.adapters.lora import LINEAR_LAYERS
from mlmoe_jax.models.backbones.catalog import entry
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier, sum_deltas
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.layers.deltas import LayerCall
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.models.params import named_variables
from mlmoe_jax.models.registries import ADAPTERS, describe_adapters
from mlmoe_jax.runs.assemble import abstract_parts

TINY = {"width": 16, "depth": 2, "heads": 2, "patch": 8, "native": 16}
SHAPES = {
    "dinov2": ViTShape(**TINY, layer_scale=0.5, mask_token=True),
    "dinov3": ViTShape(**TINY, mlp="swiglu", rotary_base=100.0, registers=2, key_bias=False),
    "clip": ViTShape(**TINY, mlp="quick_gelu", patch_bias=False, pre_norm=True),
    "siglip": ViTShape(**TINY, mlp="gelu_tanh", class_token=False),
}
NAMES = ("dora", "bitfit", "ssf", "adaptformer")


def adapter_of(name, shape=SHAPES["dinov2"], **settings):
    config = default_config()
    use_adapter(config, name, **settings)
    settings = config.model.adapters[name]
    make = lambda: ADAPTERS[name].from_config(settings, shape, dtype=None, rngs=nnx.Rngs(0))  # noqa: E731
    return drawn(make, 0.2, 5, ones=True)


def vit_of(shape=SHAPES["dinov2"]):
    return drawn(lambda: ViT(shape, rngs=nnx.Rngs(0)), 0.2, 1, ones=True)


def image(seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 16, 16, 3)), jnp.float32)


def prompts_of(shape):
    draw = np.random.default_rng(4)
    return Prompts(jnp.asarray(draw.normal(size=(shape.depth, 1, 3, shape.width)), jnp.float32))


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
    close(call.output + adapter.deltas()["blocks/1/key"](call), x @ whole + bias)


@pytest.mark.parametrize("name", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_dropout_is_only_for_training_and_drops_inputs(name):
    """DoRA computes everything from dropped inputs."""
    vit, adapter = vit_of(), adapter_of(name, rank=2, targets=("query", "value"), dropout=0.5)
    identity = jnp.eye(16)[None]

    def outputs(layer):  # row i has input i alone
        kernel, bias = layer_weights(vit, f"blocks/0/{layer}")
        call = LayerCall(identity, identity @ kernel + bias, lambda: (kernel, bias))
        return np.asarray(adapter.deltas(rngs=nnx.Rngs(1))[f"blocks/0/{layer}"](call))[0]

    plain = outputs("query"), outputs("value")
    adapter.train()
    query, value = outputs("query") / plain[0], outputs("value") / plain[1]
    assert set(np.round([query, value], 3).ravel()) == {0, 2}
    assert not np.array_equal(query, value)


@pytest.mark.slow
def test_bitfit_and_ssf_are_other_weights():
    """A ViT with deltas computes what a ViT computes whose biases, or kernels and biases, are changed by hand."""
    for name in ("bitfit", "ssf"):
        vit, adapter = vit_of(), adapter_of(name)
        by_hand, width = nnx.clone(vit), 16
        for index, block in enumerate(by_hand.blocks):
            columns = [
                (block.attn.qkv, part, slice(i * width, (i + 1) * width))
                for i, part in enumerate(("query", "key", "value"))
            ]
            whole = [(block.attn.proj, "output"), (block.mlp.fc1, "fc1"), (block.mlp.fc2, "fc2")]
            norms = [(block.norm1, "norm1"), (block.norm2, "norm2")]
            for layer, part, *places in (*columns, *whole, *norms):
                _change(layer, getattr(adapter, part), index, *places)
        _change(by_hand.patch_embed, adapter.patch_embed, 0)
        _change(by_hand.norm, adapter.norm, 0)
        prompts = prompts_of(vit.shape) if name == "ssf" else None
        read = ("cls", "patches") if prompts is None else ("cls", "prompts")
        options = {"read": read, "return_attention": True}
        ours = jax.jit(lambda: vit(image(), prompts, deltas=adapter.deltas(), **options))  # noqa: B023
        theirs = jax.jit(lambda: by_hand(image(), prompts, **options))  # noqa: B023
        jax.tree.map(lambda a, b: close(a, b, 1e-4), ours(), theirs())


def _change(layer, vectors, index, columns=slice(None)):
    matrix = layer.scale if hasattr(layer, "scale") else layer.kernel
    scale = vectors.scale[index] if hasattr(vectors, "scale") else 1.0
    shift = vectors.shift[index] if hasattr(vectors, "scale") else vectors.bias[index]
    matrix[...] = matrix[...].at[..., columns].multiply(scale)
    layer.bias[...] = layer.bias[...].at[columns].multiply(scale).at[columns].add(shift)


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


# ------------------------------------------------------------------------------------------------------------ together
@pytest.mark.slow
@pytest.mark.variants(kind=("dinov3",))
@pytest.mark.parametrize("kind", SHAPES)
def test_every_value_of_every_adapter_learns_beside_prompts(kind):
    shape = SHAPES[kind]
    vit, prompts = vit_of(shape), prompts_of(shape)
    adapters = nnx.Dict({name: adapter_of(name, shape) for name in ("lora", *NAMES)})
    structure, state = nnx.split(adapters)

    @jax.jit
    @jax.grad
    def slopes(state):
        deltas = sum_deltas([adapter.deltas() for adapter in nnx.merge(structure, state).values()])
        features = vit(image(), prompts, read=("cls", "prompts", "patches"), deltas=deltas)
        return sum(jnp.square(part).sum() for part in (features.cls, features.prompts, jnp.sin(features.patches)))

    for path, slope in nnx.to_flat_state(slopes(state)):
        assert np.isfinite(slope[...]).all()
        # a shift of all keys alike changes no softmax
        assert np.abs(slope[...]).max() > (0 if "key" in path else 1e-5), path


@pytest.mark.slow
def test_new_adapters_but_ssf_change_nothing_bit_for_bit():
    vit, config = vit_of(), default_config()
    given = {"prompts": prompts_of(vit.shape), "read": ("cls", "patches")}
    plain = vit(image(), **given)
    for name in ("lora", "dora", "bitfit", "adaptformer"):
        use_adapter(config, name, **({"targets": LINEAR_LAYERS} if name == "lora" else {}))
        new = ADAPTERS[name].from_config(config.model.adapters[name], vit.shape, dtype=None, rngs=nnx.Rngs(0))
        features = vit(image(), **given, deltas=new.deltas())
        np.testing.assert_array_equal(features.cls, plain.cls, err_msg=name)
        np.testing.assert_array_equal(features.patches, plain.patches, err_msg=name)
        if name == "lora":
            assert 0.9 / 4 < np.abs(new.query.a[...]).max() <= 1 / 4, "uniform, as in the authors' code"
    use_adapter(config, "ssf")
    ssf = ADAPTERS["ssf"].from_config(
        config.model.adapters.ssf, ViTShape(256, 4, 4, 8, 16), dtype=None, rngs=nnx.Rngs(0)
    )
    for vectors, mean in ((ssf.fc1.scale, 1), (ssf.fc1.shift, 0)):
        close([np.mean(vectors[...]), np.std(vectors[...])], [mean, 0.02], 2e-3)


def test_what_has_no_bias_is_not_tuned_by_bitfit():
    assert "key" not in adapter_of("bitfit", SHAPES["dinov3"]).targets
    assert "patch_embed" not in adapter_of("bitfit", SHAPES["clip"]).targets
    assert "norm_pre" in adapter_of("bitfit", SHAPES["clip"]).targets
    assert adapter_of("ssf", SHAPES["clip"], targets=("norm_pre", "key")).targets == ("norm_pre", "key")


# -------------------------------------------------------------------------------------------------------------- merged
def classifier(shape, *adapters):
    head = drawn(lambda: LinearHead(shape.width, 3, rngs=nnx.Rngs(0)), 0.2, 9)
    return Classifier(vit_of(shape), None, head, final_norm=True, precision="highest", adapters=dict(adapters))


def probabilities(model):
    return jax.jit(lambda: jax.nn.sigmoid(model(image()).logits))()


@pytest.mark.variants(kind=("dinov2",))
@pytest.mark.parametrize(
    ("kind", "names"), [("dinov2", ("lora", "dora", "bitfit", "ssf")), ("dinov3", ("lora", "dora", "bitfit"))]
)
def test_merged_equals_unmerged(kind, names):
    shape = SHAPES[kind]
    targets = {"targets": ("query", "key", "value", "output", "fc1", "fc2")}
    model = classifier(
        shape, *((name, adapter_of(name, shape, **(targets if name in ("lora", "dora") else {}))) for name in names)
    )
    before = probabilities(model)
    merged = merge_adapters(model)
    assert not any(path.startswith("adapters/") for path in named_variables(merged))
    np.testing.assert_allclose(probabilities(merged), before, rtol=0, atol=1e-6)
    assert len(model.adapters) == len(names), "the given model stays"
    assert np.abs(probabilities(classifier(shape)) - before).max() > 1e-2


# ------------------------------------------------------------------------------------------------------------- configs
COUNTS = {
    "lora:rank_stabilized=true": 294_912,
    "dora": 294_912 + 12 * 2 * 768,
    "bitfit:backbone=vit_b16_in21k": 102_912,
    "ssf:backbone=vit_b16_in21k": 205_824,  # the 0.205 million of the paper, without the head
    "adaptformer:backbone=vit_b16_mae": 1_189_632,  # the 1.19 million of the paper, without the head
}


@pytest.mark.parametrize("reference", COUNTS)
def test_parameters_are_those_of_the_papers(reference):
    config = load_config(reference, [])
    validate(config)
    parts = abstract_parts(config, synthetic_label_space(80, 5))
    assert (
        sum(value.size for path, value in parts.trainable.items() if path.startswith("adapters/")) == COUNTS[reference]
    )
    assert sum(value.size for value in parts.trainable.values()) == COUNTS[reference] + 61_520


@pytest.mark.slow
def test_multiply_adds_of_adapters_are_counted():
    shape = entry("vit_b16_in21k").shape
    macs = {name: nnx.eval_shape(lambda name=name: adapter_of(name, shape)).macs(197) for name in ("lora", *NAMES)}
    assert macs["bitfit"] == 0, "biases are counted with their layers"
    assert macs["dora"] == macs["lora"] == 197 * 294_912
    assert macs["ssf"] == 197 * 102_912
    assert macs["adaptformer"] == 197 * 12 * 2 * 64 * 768


def test_adapters_are_described():
    config = default_config()
    for name, settings in (("dora", {}), ("bitfit", {}), ("ssf", {"targets": ("fc1",)}), ("adaptformer", {})):
        use_adapter(config, name, **settings)
    words = "AdaptFormer (bottleneck 64) and BitFit and DoRA (rank 8; query, value) and SSF (fc1)"
    assert describe_adapters(config) == words
    use_adapter(config, "lora", rank_stabilized=True)
    assert "and rsLoRA (rank 8; query, value)" in describe_adapters(config)
