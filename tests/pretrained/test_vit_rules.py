"""Every published ViT layout fills the model that it belongs to."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.official_models import random_tensors
from helpers.paths import PARITY
from helpers.tensor_files import (
    DINOV2,
    GIANT,
    PLAIN,
    REGISTERS,
    assert_equal,
    make_vit,
    renamed,
    timm,
    values_of,
    write,
)
from helpers.twins import below

from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.pretrained.load import load_weights

D, PATCH, HEADS = PLAIN.width, PLAIN.patch, PLAIN.heads
DINOV3 = replace(REGISTERS, rotary_base=100.0, key_bias=False)
DINOV3_PLUS = replace(DINOV3, mlp="swiglu", mlp_ratio=6.0)
CLIP = replace(PLAIN, patch_bias=False, pre_norm=True)
TIPS = replace(DINOV2, registers=1)


# --------------------------------------------------------------------------------- layouts, from our parameters
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


def with_texts(p):
    """Return the tensors as on the Hugging Face Hub, in one file with the text tower."""
    tower = renamed(timm(p), (r"\.fc1\.", ".c_fc."), (r"\.fc2\.", ".c_proj."), ("^", "vision_encoder."))
    return tower | {name: np.ones((3, 3), np.float32) for name in BESIDE_TIPS}


BESIDE_TIPS = ("text_encoder.token_embedding.weight", "text_encoder.ln_final.weight", "temperature")
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
    "tips": (TIPS, with_texts, "timm", BESIDE_TIPS),
}


@pytest.mark.variants("name")
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_fills_every_parameter(tmp_path, name):
    shape, layout, source, unused = LAYOUTS[name]
    wanted, vit = values_of(make_vit(shape, 1)), make_vit(shape, 2)
    report = load_weights(vit, write(tmp_path / "weights.safetensors", layout(wanted)))
    assert_equal(vit, wanted)
    assert (report.layout, report.loaded) == (source, tuple(sorted(wanted)))
    assert report.missing == ()
    assert unused is None or set(report.unused) == set(unused)


def test_registers_in_timms_layout(tmp_path):
    """There is no mask token, and the class token's position is added to the token."""
    source, vit = make_vit(REGISTERS, 1), make_vit(REGISTERS, 2)
    before, p = values_of(vit)["mask_token"], values_of(source)
    tensors = renamed(timm(p), ("register_tokens", "reg_token"))
    tensors |= {"cls_token": p["cls_token"] + p["pos_embed"][:, :1], "pos_embed": p["pos_embed"][:, 1:]}
    del tensors["mask_token"]
    report = load_weights(vit, write(tmp_path / "weights.safetensors", tensors))
    assert (report.layout, report.missing) == ("timm_registers", ("mask_token",))
    np.testing.assert_array_equal(values_of(vit)["mask_token"], before)
    image = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    np.testing.assert_allclose(*jax.jit(lambda: (vit.embed(image)[0], source.embed(image)[0]))(), atol=1e-6)


def scenic(p, shape):
    """Both class tokens are one tensor, and there is no position of the class token, mask token or LayerScale."""
    tokens, side = "encoder/ToTokenSequence_0", shape.native // PATCH
    mlp = "FFNSwiGluFused_0" if shape.mlp == "swiglu" else "MlpBlock_0"
    tensors = {
        f"{tokens}/cls": np.concatenate([p["cls_token"], p["register_tokens"]], axis=1),
        f"{tokens}/posembed_input": p["pos_embed"][:, 1:].reshape(1, side, side, D),
    }
    others = ("cls", "Transformer/posembed", "register", "mask", "head/", "pre_logits/")
    flax = {name: value for name, value in augreg(p).items() if not name.startswith(others) and "/ls" not in name}
    flax = renamed(
        flax,
        *(("Attention_1", "Attention_0"), ("LayerNorm_2", "LayerNorm_1"), ("MlpBlock_3", mlp)),
        *((r"(Fused_0)/Dense_1", r"\1/Dense_2"), ("^embedding", "ToTokenSequence_0/embedding")),
        *(("^Transformer/encoder_norm", "encoder_norm"), ("^Transformer", "transformer"), ("^", "encoder/")),
    )
    for name, value in flax.items():
        if "Fused_0/Dense_0" in name:
            tensors[name], tensors[name.replace("Dense_0", "Dense_1")] = np.split(value, 2, axis=-1)
        else:
            tensors[name] = value
    return tensors


@pytest.mark.parametrize("shape", [TIPS, replace(TIPS, mlp="swiglu")], ids=["gelu", "swiglu"])
def test_tips_for_jax(tmp_path, shape):
    wanted, vit = values_of(make_vit(shape, 1)), make_vit(shape, 2)
    missing = {path: value for path, value in values_of(vit).items() if re.search("/ls|mask", path)}
    report = load_weights(vit, write(tmp_path / "weights.npz", scenic(wanted, shape)))
    assert (report.layout, report.missing, report.unused) == ("tips_scenic", tuple(sorted(missing)), ())
    positions = np.concatenate([np.zeros((1, 1, D)), wanted["pos_embed"][:, 1:]], axis=1)
    assert_equal(vit, wanted | missing | {"pos_embed": positions})


@pytest.mark.variants("name")
@pytest.mark.parametrize(("name", "wrapper"), [("vit", "vit."), ("dinov2_small", "dinov2."), ("vit", "model.vit.")])
def test_a_classifier_of_hugging_face_gives_its_backbone(tmp_path, name, wrapper):
    tensors = below(np.load(PARITY / f"vit_{name}.npz"), "weights/")
    shape = ViTShape(16, 3, 4, patch=7, native=28)
    if name != "vit":
        shape = replace(shape, heads=2, layer_scale=1.0, mask_token=True)
    body, whole = make_vit(shape, 1), make_vit(shape, 2)
    load_weights(body, write(tmp_path / "body.safetensors", tensors))
    inside = {wrapper + key: tensor for key, tensor in tensors.items() if not key.startswith("pooler")}
    inside["classifier.weight"] = np.ones((3, 16), np.float32)
    report = load_weights(whole, write(tmp_path / "whole.safetensors", inside))
    assert report.unused == ("classifier.weight",)
    assert_equal(whole, values_of(body))


# ------------------------------------------------------------------------------------------- prompt-tuned models
TUNED = ViTShape(48, 3, 4, patch=16, native=64)
PROMPT_TUNED = {
    "VPT deep": (4, "transformer.embeddings.cls_token"),
    "VPT shallow": (3, "transformer.embeddings.cls_token"),
    "E2VPT": (9, "transformer.embeddings.cls_token"),
    "GateVPT": (5, "cls_token"),
    "ML-VPT on MAE": (14, "img_encoder.cls_token"),
    "ML-VPT on DINOv2": (14, "img_encoder.cls_token"),
}


@pytest.mark.variants(name=("VPT deep", "ML-VPT on DINOv2"))  # whole models of the others are in test_official.py
@pytest.mark.parametrize("name", PROMPT_TUNED)
def test_the_backbone_of_a_prompt_tuned_model_is_loaded_and_other_tensors_are_listed(tmp_path, name):
    (others, class_token), tensors = PROMPT_TUNED[name], random_tensors(name)
    dinov2 = replace(TUNED, patch=14, native=56, layer_scale=1.0, mask_token=True)
    vit = make_vit(dinov2 if name.endswith("DINOv2") else TUNED, 1)
    report = load_weights(vit, write(tmp_path / "weights.safetensors", tensors))
    of_prompts = "head|prompt|QKV_embeddings|gate_logit|temp|adapt_experts|c[ol]_(gate|fc)"
    assert all(re.search(of_prompts, key) for key in report.unused)
    assert (len(report.unused), set(report.loaded), report.missing) == (others, set(values_of(vit)), ())
    np.testing.assert_array_equal(values_of(vit)["cls_token"], tensors[class_token])
