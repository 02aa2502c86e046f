"""Every published ViT layout fills the model that it belongs to."""

import json
import re

import jax
import numpy as np
import pytest
from helpers.paths import TESTS
from helpers.tensor_files import make_vit, params_of, renamed, timm, write

from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.pretrained import load
from mlmoe_jax.pretrained.load import load_weights

LISTED = json.loads((TESTS / "parity" / "checkpoint_keys.json").read_text())
D, PATCH, HEADS = 16, 4, 2
PLAIN = ViTShape(width=D, depth=2, heads=HEADS, patch=PATCH, native=8)
DINOV2 = ViTShape(width=D, depth=2, heads=HEADS, patch=PATCH, native=8, layer_scale=1.0, mask_token=True)
REGISTERS = ViTShape(**vars(DINOV2) | {"registers": 4})
GIANT = ViTShape(**vars(DINOV2) | {"mlp": "swiglu"})
DINOV3 = ViTShape(**vars(REGISTERS) | {"rotary_base": 100.0, "key_bias": False})
DINOV3_PLUS = ViTShape(**vars(DINOV3) | {"mlp": "swiglu", "mlp_ratio": 6.0})
CLIP = ViTShape(**vars(PLAIN) | {"patch_bias": False, "pre_norm": True})


# --------------------------------------------------------------------------------- layouts, from our parameters
def split_qkv(tensors: dict[str, np.ndarray], into: str) -> dict[str, np.ndarray]:
    """Split fused projections along the first axis; QKV in the name `into` stands for query, key and value."""
    result = {}
    for name, tensor in tensors.items():
        if ".qkv." in name:
            for part, which in zip(np.split(tensor, 3), ("query", "key", "value"), strict=True):
                result[name.replace("qkv", into.replace("QKV", which))] = part
        else:
            result[name] = tensor
    return result


def chunked(p):
    return renamed(timm(p), (r"^blocks\.", "blocks.0."))


def original_giant(p):
    return renamed(timm(p), (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))


def moco_linear(p):
    """Return the tensors as `read_torch_file` does, without the common prefix `module.`."""
    return timm(p) | {"head.weight": np.ones((3, D), np.float32), "head.bias": np.ones(3, np.float32)}


def moco_pretraining(p):
    head = {"head.0.weight": np.ones((4, D), np.float32), "head.1.running_mean": np.ones(4, np.float32)}
    encoder = timm(p) | head
    return {
        **renamed(encoder, ("^", "module.momentum_encoder.")),
        **renamed(encoder, ("^", "module.base_encoder.")),
        "module.predictor.0.weight": np.ones((4, 4), np.float32),
    }


def autoencoder(p):
    decoder = {"mask_token": (1, 1, 3), "decoder_embed.weight": (3, D), "decoder_norm.bias": (3,)}
    return timm(p) | {name: np.ones(shape, np.float32) for name, shape in decoder.items()}


def vpt(p):
    tensors = renamed(
        split_qkv(timm(p), "QKV"),
        (r"^blocks\.(\d+)", r"encoder.layer.\1"),
        (r"\.norm1", ".attention_norm"),
        (r"\.norm2", ".ffn_norm"),
        (r"attn\.proj", "attn.out"),
        (r"mlp", "ffn"),
        (r"^norm", "encoder.encoder_norm"),
        (r"^cls_token", "embeddings.cls_token"),
        (r"^pos_embed", "embeddings.position_embeddings"),
        (r"^patch_embed\.proj", "embeddings.patch_embeddings"),
        (r"^", "transformer."),
    )
    return tensors | {"head.bias": np.ones(3, np.float32), "transformer.prompt_embeddings": np.ones((1, 5, D))}


def gate_vpt(p):
    return timm(p) | {"prompt_embeddings": np.ones((1, 5, D)), "gate_logit": np.ones(1), "temp": np.ones(2)}


def augreg(p, wrapper=""):
    names = {"cls_token": "cls", "pos_embed": "Transformer/posembed_input/pos_embedding"}
    modules = {"norm1": "LayerNorm_0", "norm2": "LayerNorm_2", "mlp/fc1": "MlpBlock_3/Dense_0"}
    modules |= {"mlp/fc2": "MlpBlock_3/Dense_1", "attn": "MultiHeadDotProductAttention_1"}
    tensors = {"head/kernel": np.ones((D, 3)), "head/bias": np.ones(3), "pre_logits/kernel": np.ones((D, D))}
    for path, value in p.items():
        name = re.sub(r"^blocks/(\d+)", r"Transformer/encoderblock_\1", names.get(path, path))
        name = re.sub(r"^norm", "Transformer/encoder_norm", name)
        for ours, theirs in modules.items():
            name = name.replace(f"/{ours}/", f"/{theirs}/")
        if path == "patch_embed/kernel":
            value = value.reshape(PATCH, PATCH, 3, D)
        name = name.replace("patch_embed", "embedding").replace("/proj/", "/out/")
        if "/out/kernel" in name:
            value = value.reshape(HEADS, D // HEADS, D)
        if "/qkv/" in name:
            for part, which in zip(np.split(value, 3, axis=-1), ("query", "key", "value"), strict=True):
                tensors[name.replace("qkv", which)] = part.reshape(*part.shape[:-1], HEADS, D // HEADS)
        else:
            tensors[name] = value
    return {wrapper + name: tensor for name, tensor in tensors.items()}


def augreg_in_a_training_state(p):
    return augreg(p, "opt/target/") | {"opt/state/step": np.zeros((), np.int32)}


def original_dinov3(p):
    """The biases of keys have values in the file, which a mask of zeros makes ineffective."""
    tensors = renamed(timm(p), ("register_tokens", "storage_tokens"))
    for name in [name for name in tensors if name.endswith("qkv.bias")]:
        query, value = np.split(tensors[name], 2)
        tensors[name] = np.concatenate([query, np.full(D, 7, np.float32), value])
        tensors[f"{name}_mask"] = np.repeat(np.array([1, 0, 1], np.float32), D)
    return tensors | {"rope_embed.periods": np.ones(D // HEADS // 4, np.float32)}


def original_dinov3_plus(p):
    tensors = {}
    for name, tensor in renamed(original_dinov3(p), (r"mlp\.fc2", "mlp.w3")).items():
        halves = np.split(tensor, 2) if ".mlp.fc1." in name else [tensor]
        tensors |= {name.replace("fc1", f"w{place + 1}"): half for place, half in enumerate(halves)}
    return tensors


def openclip(p):
    tensors = timm(p) | {"cls_token": p["cls_token"][0, 0], "pos_embed": p["pos_embed"][0]}
    tower = renamed(
        tensors,
        (r"^blocks", "transformer.resblocks"),
        (r"\.qkv\.", ".in_proj_"),
        (r"\.attn\.proj", ".attn.out_proj"),
        (r"\.norm([12])", r".ln_\1"),
        (r"\.fc1", ".c_fc"),
        (r"\.fc2", ".c_proj"),
        (r"^norm_pre", "ln_pre"),
        (r"^norm", "ln_post"),
        (r"^cls_token", "class_embedding"),
        (r"^pos_embed", "positional_embedding"),
        (r"^patch_embed\.proj", "conv1"),
        ("^", "visual."),
    )
    return tower | {name: np.ones((3, 3), np.float32) for name in BESIDE_OPENCLIP}


BESIDE_OPENCLIP = (
    *("visual.proj", "positional_embedding", "text_projection", "token_embedding.weight", "ln_final.weight"),
    *("logit_scale", "transformer.resblocks.0.ln_1.weight", "transformer.resblocks.0.mlp.c_fc.bias"),
)
MASKS = tuple(f"blocks.{block}.attn.qkv.bias_mask" for block in range(2))

LAYOUTS = {
    "dinov2": (DINOV2, timm, "timm", ()),
    "dinov2_chunked": (DINOV2, chunked, "timm", ()),
    "dinov2_registers": (REGISTERS, timm, "timm", ()),
    "dinov2_giant": (GIANT, original_giant, "timm", ()),
    "timm_giant": (GIANT, timm, "timm", ()),
    "mae": (PLAIN, timm, "timm", ()),
    "mae_with_decoder": (PLAIN, autoencoder, "mae", ("mask_token", "decoder_embed.weight", "decoder_norm.bias")),
    "moco_linear": (PLAIN, moco_linear, "timm", ("head.weight", "head.bias")),
    "moco_pretraining": (PLAIN, moco_pretraining, "timm", None),
    "augreg": (PLAIN, augreg, "augreg", ("head/kernel", "head/bias", "pre_logits/kernel")),
    "augreg_in_a_training_state": (PLAIN, augreg_in_a_training_state, "augreg", None),
    "dinov3": (DINOV3, original_dinov3, "dinov3", (*MASKS, "rope_embed.periods")),
    "dinov3_plus": (DINOV3_PLUS, original_dinov3_plus, "dinov3", (*MASKS, "rope_embed.periods")),
    "openclip": (CLIP, openclip, "openclip", BESIDE_OPENCLIP),
    "vpt": (PLAIN, vpt, "vpt_shallow", ("head.bias", "transformer.prompt_embeddings")),
    "gate_vpt": (PLAIN, gate_vpt, "gate_vpt", ("prompt_embeddings", "gate_logit", "temp")),
}


@pytest.mark.variants("name")
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_fills_every_parameter(tmp_path, name):
    shape, layout, source, unused = LAYOUTS[name]
    wanted, vit = params_of(make_vit(shape, 1)), make_vit(shape, 2)
    report = load_weights(vit, write(tmp_path / "weights.safetensors", layout(wanted)))
    loaded = params_of(vit)
    for path, value in wanted.items():
        np.testing.assert_array_equal(loaded[path], value, err_msg=path)
    assert (report.layout, report.loaded) == (source, tuple(sorted(wanted)))
    assert report.missing == ()
    assert unused is None or set(report.unused) == set(unused)


def test_registers_in_timms_layout(tmp_path):
    """There is no mask token, and the class token's position is added to the token."""
    source, vit = make_vit(REGISTERS, 1), make_vit(REGISTERS, 2)
    before, p = params_of(vit)["mask_token"], params_of(source)
    tensors = renamed(timm(p), ("register_tokens", "reg_token"))
    tensors |= {"cls_token": p["cls_token"] + p["pos_embed"][:, :1], "pos_embed": p["pos_embed"][:, 1:]}
    del tensors["mask_token"]
    report = load_weights(vit, write(tmp_path / "weights.safetensors", tensors))
    assert (report.layout, report.missing) == ("timm_registers", ("mask_token",))
    np.testing.assert_array_equal(params_of(vit)["mask_token"], before)
    for size in (8, 12):
        image = jax.random.normal(jax.random.key(0), (2, size, size, 3))
        np.testing.assert_allclose(vit.embed(image)[0], source.embed(image)[0], atol=1e-6)


@pytest.mark.variants("name")
@pytest.mark.parametrize(("name", "wrapper"), [("vit", "vit."), ("dinov2_small", "dinov2."), ("vit", "model.vit.")])
def test_a_classifier_of_hugging_face_gives_its_backbone(tmp_path, name, wrapper):
    stored = np.load(TESTS / "parity" / f"vit_{name}.npz")
    tensors = {key[8:]: stored[key].astype(np.float32) for key in stored if key.startswith("weights/")}
    shape = ViTShape(16, 3, 4 if name == "vit" else 2, patch=7, native=28)
    if name != "vit":
        shape = ViTShape(**vars(shape) | {"layer_scale": 1.0, "mask_token": True})
    body, whole = make_vit(shape, 1), make_vit(shape, 2)
    load_weights(body, write(tmp_path / "body.safetensors", tensors))
    inside = {wrapper + key: tensor for key, tensor in tensors.items() if not key.startswith("pooler")}
    inside["classifier.weight"] = np.ones((3, 16), np.float32)
    report = load_weights(whole, write(tmp_path / "whole.safetensors", inside))
    assert report.unused == ("classifier.weight",)
    for path, value in params_of(body).items():
        np.testing.assert_array_equal(params_of(whole)[path], value, err_msg=path)


@pytest.mark.parametrize("suffix", load.TORCH_SUFFIXES)
def test_torch_suffixes_use_the_torch_reader(tmp_path, monkeypatch, suffix):
    wanted, vit = params_of(make_vit(PLAIN, 1)), make_vit(PLAIN, 2)
    (path := tmp_path / f"weights{suffix}").touch()
    asked = []
    monkeypatch.setattr(load, "read_torch_file", lambda file: asked.append(file.name) or moco_linear(wanted))
    assert load_weights(vit, path).layout == "timm"
    assert len(asked) == 1


# ------------------------------------------------------------------------------------------- prompt-tuned models
@pytest.mark.parametrize("name", ["VPT deep", "VPT shallow", "E2VPT", "GateVPT", "ML-VPT on MAE", "ML-VPT on DINOv2"])
def test_the_backbone_of_a_prompt_tuned_model_is_loaded_and_other_tensors_are_listed(tmp_path, name):
    listed, draw = LISTED[name], np.random.default_rng(0)
    listed = LISTED[listed] if isinstance(listed, str) else listed
    tensors = {key: draw.normal(size=shape).astype(np.float32) for key, shape in listed["keys"].items()}
    shape = ViTShape(48, 3, 4, patch=16, native=64)
    if name.endswith("DINOv2"):
        shape = ViTShape(48, 3, 4, patch=14, native=56, layer_scale=1.0, mask_token=True)
    vit = make_vit(shape, 1)
    report = load_weights(vit, write(tmp_path / "weights.safetensors", tensors))
    prompts = {"VPT deep": 2, "VPT shallow": 1, "E2VPT": 7, "GateVPT": 3}  # and masks, gates, temperatures
    own, head = prompts.get(name, 2), 2 if name in prompts else 12
    assert len(report.unused) == own + head
    of_prompts = "head|prompt|QKV_embeddings|gate_logit|temp|adapt_experts|c[ol]_(gate|fc)"
    assert all(re.search(of_prompts, key) for key in report.unused)
    assert set(report.loaded) == set(params_of(vit))
    assert report.missing == ()
    embedding = "transformer.embeddings.cls_token" if "transformer.embeddings.cls_token" in tensors else "cls_token"
    embedding = "img_encoder.cls_token" if name.startswith("ML-VPT") else embedding
    np.testing.assert_array_equal(params_of(vit)["cls_token"], tensors[embedding])


def test_a_hidden_layer_of_the_classifier_is_not_part_of_the_backbone(refusal, tmp_path):
    tensors = vpt(params_of(make_vit(PLAIN, 1)))
    tensors = renamed(tensors, ("^transformer", "enc.transformer")) | {"head.projection.0.weight": np.ones((D, D))}
    report = load_weights(make_vit(PLAIN, 2), write(tmp_path / "a.npz", tensors))
    assert set(report.unused) == {"head.bias", "head.projection.0.weight", "enc.transformer.prompt_embeddings"}
    tensors["enc.transformer.encoder.layer.0.adapter.weight"] = np.ones(3, np.float32)
    sentence = refused(refusal, make_vit(PLAIN, 2), write(tmp_path / "b.npz", tensors))
    assert sentence.endswith("tensor enc.transformer.encoder.layer.0.adapter.weight is unknown")


# ------------------------------------------------------------------------------------------------------ mistakes
def refused(refusal, vit, path) -> str:
    """Return the error of loading, after checking that the module is unchanged."""
    before = params_of(vit)
    sentence = refusal(load_weights, vit, path)
    after = params_of(vit)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    return sentence


def test_an_unknown_tensor_is_named_as_in_the_file(refusal, tmp_path):
    tensors = renamed(timm(params_of(make_vit(PLAIN, 1))), ("^", "module."))
    tensors |= {"module.blocks.0.adapter": np.ones(3), "scheduler": np.ones(3)}
    sentence = refused(refusal, make_vit(PLAIN, 2), write(tmp_path / "weights.npz", tensors))
    assert sentence.endswith("tensor module.blocks.0.adapter is unknown; tensor scheduler is unknown")


@pytest.mark.parametrize(
    ("file", "model", "says"),
    [
        (REGISTERS, DINOV2, "register_tokens is not a parameter of this model"),
        (DINOV2, REGISTERS, "no tensor for register_tokens"),
        (GIANT, DINOV2, "blocks/0/mlp/fc1/bias has shape (96,) instead of (64,)"),
        (DINOV2, PLAIN, "blocks/0/ls1/gamma is not a parameter of this model"),
        (PLAIN, DINOV2, "no tensor for blocks/0/ls1/gamma"),
        (PLAIN, ViTShape(**vars(PLAIN) | {"depth": 3}), "no tensor for blocks/2/attn/proj/bias"),
        (PLAIN, ViTShape(**vars(PLAIN) | {"native": 12}), "pos_embed has shape (1, 5, 16) instead of (1, 10, 16)"),
    ],
    ids=["registers", "no registers", "swiglu", "layer scale", "no layer scale", "depth", "grid"],
)
def test_another_architecture_is_one_sentence(refusal, tmp_path, file, model, says):
    path = write(tmp_path / "weights.safetensors", timm(params_of(make_vit(file, 1))))
    assert says in refused(refusal, make_vit(model, 2), path)


def test_two_tensors_for_one_parameter_are_refused(refusal, tmp_path):
    tensors = timm(params_of(make_vit(PLAIN, 1)))
    tensors["blocks.0.1.norm1.bias"] = tensors["blocks.1.norm1.bias"]
    sentence = refused(refusal, make_vit(PLAIN, 2), write(tmp_path / "weights.npz", tensors))
    assert sentence == "more than one tensor would become blocks/1/norm1/bias, such as blocks.0.1.norm1.bias"


def test_integer_tensors_are_refused(refusal, tmp_path):
    tensors = timm(params_of(make_vit(PLAIN, 1)))
    tensors["norm.weight"] = np.ones(D, np.int8)
    sentence = refused(refusal, make_vit(PLAIN, 2), write(tmp_path / "weights.npz", tensors))
    assert sentence.endswith("norm/scale is of type int8 instead of a floating-point type")
