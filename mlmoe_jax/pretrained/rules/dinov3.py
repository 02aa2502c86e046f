"""DINOv3 layouts: Hugging Face's and the original one."""

import numpy as np

from mlmoe_jax.pretrained.rules.base import Rule, Source, Transform, flat_rows, linear, norm, same, transpose
from mlmoe_jax.pretrained.rules.vit import fused, patches


def without_keys(tensor: np.ndarray) -> np.ndarray:
    """[3D], the biases of queries, keys and values -> [2D]: the authors' code multiplies that of the keys by 0."""
    query, _, value = np.split(tensor, 3)
    return np.concatenate([query, value])


def _gated(theirs: str, *, gate: str, value: str) -> tuple[Rule, ...]:
    """Return the rules of the first layer of an MLP: a `gate` in front of the `value`, or a `value` alone."""
    rules = []
    for place, name in enumerate((gate, value)):
        joined = {"at": (place,), "axes": (-1,)}
        rules.append(Rule(rf"{theirs}\.{name}\.weight", r"blocks/\1/mlp/fc1/kernel", transpose, **joined))
        rules.append(Rule(rf"{theirs}\.{name}\.bias", r"blocks/\1/mlp/fc1/bias", **joined))
    return tuple(rules)


def _tokens(prefix: str, registers: str, to_mask: Transform) -> tuple[Rule, ...]:
    return (
        Rule(f"{prefix}cls_token", "cls_token"),
        Rule(f"{prefix}mask_token", "mask_token", to_mask),
        Rule(f"{prefix}{registers}", "register_tokens"),
    )


_LAYER, _BLOCK = r"layer\.(\d+)", r"blocks\.(\d+)"
HUGGING_FACE = Source(
    "hugging_face_dinov3",
    "layer.0.attention.q_proj.weight",
    (
        *_tokens(r"embeddings\.", "register_tokens", flat_rows),
        *patches(r"embeddings\.patch_embeddings"),
        *norm(rf"{_LAYER}\.norm([12])", r"blocks/\1/norm\2"),
        *fused(rf"{_LAYER}\.attention\.QKV_proj\.", names=("q", "k", "v")),
        *linear(rf"{_LAYER}\.attention\.o_proj", r"blocks/\1/attn/proj"),
        *_gated(rf"{_LAYER}\.mlp", gate="gate_proj", value="up_proj"),
        *linear(rf"{_LAYER}\.mlp\.down_proj", r"blocks/\1/mlp/fc2"),
        Rule(rf"{_LAYER}\.layer_scale([12])\.lambda1", r"blocks/\1/ls\2/gamma"),
        *norm("norm", "norm"),
    ),
    ignored=(r"classifier\..*",),
)
ORIGINAL = Source(
    "dinov3",
    "storage_tokens",
    (
        *_tokens("", "storage_tokens", same),
        *patches(r"patch_embed\.proj"),
        *norm(rf"{_BLOCK}\.norm([12])", r"blocks/\1/norm\2"),
        Rule(rf"{_BLOCK}\.attn\.qkv\.weight", r"blocks/\1/attn/qkv/kernel", transpose),
        Rule(rf"{_BLOCK}\.attn\.qkv\.bias", r"blocks/\1/attn/qkv/bias", without_keys),
        *linear(rf"{_BLOCK}\.attn\.proj", r"blocks/\1/attn/proj"),
        *_gated(rf"{_BLOCK}\.mlp", gate="w1", value="(?:fc1|w2)"),
        *linear(rf"{_BLOCK}\.mlp\.(?:fc2|w3)", r"blocks/\1/mlp/fc2"),
        Rule(rf"{_BLOCK}\.ls([12])\.gamma", r"blocks/\1/ls\2/gamma"),
        *norm("norm", "norm"),
    ),
    # The mask of the keys' bias, and the frequencies of the rotary positions, which follow from the architecture.
    ignored=(rf"{_BLOCK}\.attn\.qkv\.bias_mask", r"rope_embed\.periods"),
)
SOURCES = (HUGGING_FACE, ORIGINAL)
