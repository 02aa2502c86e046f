"""LoRA against its formula, against merged kernels, and in a training."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny
from helpers.drawn import drawn

from mlmoe_jax.config import default_config, from_json, load_config, set_key, to_json, use_adapter, validate
from mlmoe_jax.config.defaults import adapter_section
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.main import main
from mlmoe_jax.models.adapters.lora import LINEAR_LAYERS, LoRA
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.layers.deltas import LayerCall
from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.models.registries import describe_adapters
from mlmoe_jax.runs.assemble import abstract_parts
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import open_run

SHAPE = ViTShape(width=32, depth=3, heads=4, patch=8, native=32, layer_scale=0.5)
GATED = ViTShape(width=32, depth=3, heads=4, patch=8, native=32, mlp="swiglu", rotary_base=100.0, registers=2)


def lora(shape=SHAPE, **settings):
    """Return a LoRA with random values in all matrices."""
    config = default_config()
    use_adapter(config, "lora", **settings)
    return drawn(lambda: LoRA(config.model.adapters.lora, shape, rngs=nnx.Rngs(0)), 0.3, 3)


def call(tokens):
    return LayerCall(tokens, tokens, None)


def vit_of(shape):
    return drawn(lambda: ViT(shape, rngs=nnx.Rngs(0)), 0.3, 1)


@pytest.fixture(scope="module")
def image():
    return jnp.asarray(np.random.default_rng(2).normal(size=(3, 32, 32, 3)), jnp.float32)


def prompts_of(vit, count=4):
    draw = np.random.default_rng(4)
    return Prompts(jnp.asarray(draw.normal(size=(vit.shape.depth, 1, count, vit.shape.width)), jnp.float32))


def merged(vit, adapter):
    """Return a ViT whose kernels contain the updates: W + (alpha / rank)·A·B, in numpy."""
    vit, width = nnx.clone(vit), vit.shape.width
    columns = {"query": slice(0, width), "key": slice(width, 2 * width), "value": slice(2 * width, None)}
    for index, block in enumerate(vit.blocks):
        places = {"output": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}
        for target in adapter.targets:
            update, layer = getattr(adapter, target), places.get(target, block.attn.qkv)
            kernel = np.array(layer.kernel[...])
            product = np.asarray(update.a[index]) @ np.asarray(update.b[index])
            kernel[:, columns.get(target, slice(None))] += adapter.scale * product
            layer.kernel[...] = jnp.asarray(kernel)
    return vit


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- formula
def test_an_update_is_its_formula():
    adapter = lora(rank=4, alpha=2.0, targets=("key", "fc2"))
    x = np.random.default_rng(5).normal(size=(2, 5, 128)).astype(np.float32)
    deltas = adapter.deltas()
    for block in range(3):
        a, b = (np.asarray(matrix[block]) for matrix in (adapter.fc2.a, adapter.fc2.b))
        term = deltas[f"blocks/{block}/fc2"](call(x))
        np.testing.assert_allclose(term, 2.0 / 4 * x @ a @ b, rtol=2e-5, atol=2e-5)
    assert deltas.keys() == {f"blocks/{block}/{layer}" for block in range(3) for layer in ("key", "fc2")}
    stable = lora(rank=4, alpha=2.0, targets=("fc2",), rank_stabilized=True).deltas()["blocks/1/fc2"](call(x))
    np.testing.assert_allclose(
        stable, 2 * deltas["blocks/1/fc2"](call(x)), rtol=1e-6, err_msg="2 / √4 instead of 2 / 4"
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPE, GATED], ids=["gelu", "swiglu, rotary"])
@pytest.mark.parametrize("targets", [("query", "value"), LINEAR_LAYERS], ids="+".join)
def test_updates_are_those_of_merged_kernels(shape, targets, image):
    """In all blocks, for image tokens and for prompts, which provide keys and values only."""
    vit, adapter = vit_of(shape), lora(shape, rank=2, targets=targets)
    deltas, whole = adapter.deltas(), merged(vit, adapter)
    for prompts in (None, prompts_of(vit)):
        read = ("cls", "patches") if prompts is None else ("cls", "prompts")
        given = {"read": read, "return_attention": True}
        ours, theirs, plain = jax.jit(
            lambda image, prompts=prompts, given=given: (
                vit(image, prompts, **given, deltas=deltas),
                whole(image, prompts, **given),
                vit(image, prompts).cls,
            )
        )(image)
        assert np.abs(ours.cls - plain).max() > 1e-2
        for name in read:
            close(getattr(ours, name), getattr(theirs, name))
            if name != "patches":
                close(ours.attention[name], theirs.attention[name])


@pytest.mark.slow
def test_a_recomputed_block_has_the_same_gradient(image):
    """With dropout: the blocks that are computed again in the backward pass drop the same entries."""
    gradients = []
    for remat in (False, True):
        vit = vit_of(SHAPE)
        vit.remat = remat
        structure, state = nnx.split(lora(rank=2, dropout=0.5))

        def loss(state, vit=vit, structure=structure):
            adapter = nnx.merge(structure, state)
            adapter.train()
            return vit(image, deltas=adapter.deltas(rngs=nnx.Rngs(3))).cls.sum()

        gradients.append(jax.jit(jax.grad(loss))(state))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *gradients)


# --------------------------------------------------------------------------------------------------- a method's model
def test_frozen_kernels_get_no_gradient():
    """The backward pass has the products of the forward pass, for inputs, and small ones, but none for kernels."""
    config = load_config("lora:dataset=digits", [])
    parts = abstract_parts(config, synthetic_label_space(10, 1))
    image = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)

    def loss(trainable, frozen, image):
        return parts.definition.merge(trainable, frozen)(image).logits.sum()

    forward, backward = (
        count_macs(jax.make_jaxpr(function)(parts.trainable, parts.frozen, image).jaxpr)
        for function in (loss, jax.grad(loss))
    )
    assert backward < 2.4 * forward, "with gradients of all kernels it would be three times"


# ------------------------------------------------------------------------------------------------------------ settings
def test_a_config_with_an_adapter_is_stored_and_read():
    config = load_config("lora:rank=4,targets=query+key,alpha=2,dataset=digits", [])
    validate(config)
    settings = config.model.adapters.lora
    assert (settings.rank, settings.targets, settings.alpha, settings.dropout) == (4, ("query", "key"), 2.0, 0.0)
    assert load_config("lora:rank=4,targets=query+key,alpha=2,dataset=digits", []).to_dict() == config.to_dict()
    assert from_json(to_json(config)).to_dict() == config.to_dict()
    stored = json.loads(to_json(config))
    del stored["model"]["adapters"]["lora"]["dropout"]  # a setting that is newer than the run
    assert from_json(json.dumps(stored)).model.adapters.lora.dropout == 0
    del stored["model"]["adapters"]
    assert not from_json(json.dumps(stored)).model.adapters
    assert describe_adapters(config) == "LoRA (rank 4; query, key)"


def test_one_key_adds_an_adapter_with_the_defaults_of_the_others():
    config = load_config("vpt:dataset=digits", [("model.adapters.lora.rank", "2")])
    assert config.model.adapters.lora.targets == ("query", "value")
    set_key(config, "model.adapters", "lora", role="key")
    assert config.model.adapters.lora.rank == 2
    use_adapter(config, "lora", alpha=1.0)
    assert (config.model.adapters.lora.rank, config.model.adapters.lora.alpha) == (2, 1.0)
    assert describe_adapters(config) == "deep prompts and LoRA (rank 2; query, value)"
    section = adapter_section("lora")
    assert section.entries["rank"].allowed == "an integer of at least 1 and at most 4,096"


# ------------------------------------------------------------------------------------------------------------ training
@pytest.mark.slow
def test_a_training_saves_resumes_and_transfers_updates(tmp_path, monkeypatch):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    tiny.use_vit(monkeypatch, patch=16)
    tiny.use_scenes(monkeypatch, train=40, val=20, test=20, test_shift=20)
    common = [
        f"--config.{setting}"
        for setting in (
            "model.backbone.weights=none",
            "train.batch_size=20",
            "train.log_every=1",
            "eval.batch_size=20",
            "eval.every_epochs=1",
            "log.tensorboard=False",
            "data.test_splits=test",
            "train.epochs=2",
        )
    ]
    options = "dataset=digits,rank=2,targets=query+fc1,prompts=2,dropout=0.1"
    assert main([f"--config=lora:{options}", f"--workdir={tmp_path / 'one'}", *common]) == 0
    run = open_run(RunFolder(tmp_path / "one"))
    assert {path.rsplit("/", 1)[0] for path in run.values} == {
        "adapters/lora/query",
        "adapters/lora/fc1",
        "prompts",
        "head/classifier",
    }
    assert np.abs(np.asarray(run.values["adapters/lora/fc1/b"])).max() > 0, "it has learned"
    assert not any(path.startswith("backbone/") for path in run.values)
    again = [f"--config=lora:{options}", f"--workdir={tmp_path / 'two'}", *common]
    source = f"--config.init_from={tmp_path / 'one'}"
    assert main([*again, source, "--config.optim.learning_rate=1e-12"]) == 0
    moved = open_run(RunFolder(tmp_path / "two")).values
    for path, value in run.values.items():
        np.testing.assert_allclose(np.asarray(moved[path]), np.asarray(value), atol=1e-6, err_msg=path)
