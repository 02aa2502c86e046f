"""ViT layouts: this package, timm (also DINOv2 and MoCo v3), MAE, Hugging Face, AugReg (Flax), DINOv3, and the vision
towers of CLIP (Hugging Face and OpenCLIP) and SigLIP."""

import numpy as np

from mlmoe_jax.pretrained.rules.base import (
    Layout,
    Rule,
    Rules,
    Transform,
    flatten_rows,
    identity,
    linear_rules,
    nest,
    norm_rules,
    pad_class_position,
    patch_kernel,
    transpose,
)
from mlmoe_jax.pretrained.rules.head_names import attention_rules

# `blocks.3`, or `blocks.0.3` in files of a model with blocks in chunks.
BLOCK, CHUNKED_BLOCK = r"blocks\.(?:\d+\.)?(\d+)", r"blocks\.0\.(\d+)"


def patch_rules(pattern: str) -> Rules:
    """Return the rules of the convolution of a patch embedding in PyTorch; `pattern` is the regex of its name."""
    return linear_rules(pattern, "patch_embed", kernel=patch_kernel)


def fuse_rules(
    pattern: str,
    kernel: str = "weight",
    to_matrix: Transform = transpose,
    to_vector: Transform = identity,
    *,
    names: tuple[str, ...] = ("query", "key", "value"),
    target: str = r"blocks/\1/attn/qkv",
) -> Rules:
    """Return the rules that concatenate separate layers, by default queries, keys and values, to the layer `target`.

    Args:
      pattern: regex of a layer's tensors up to `kernel` or "bias". PART in it stands for an item of `names`.
      kernel: the end of the name of the weight tensor.
      to_matrix: conversion of the weight.
      to_vector: conversion of the bias.
      names: names of the layers, in the order of concatenation.
    """
    rules = []
    for index, name in enumerate(names):
        layer, part = pattern.replace("PART", name), {"index": (index,), "axes": (-1,)}
        rules.append(Rule(f"{layer}{kernel}", f"{target}/kernel", to_matrix, **part))
        rules.append(Rule(f"{layer}bias", f"{target}/bias", to_vector, **part))
    return tuple(rules)


def timm_rules(
    mask_token: bool = True, positions: Transform = identity, block: str = BLOCK, norm_name: str = "norm"
) -> Rules:
    """Return the rules of the ViTs of timm, and of the repositories of DINOv2, MAE, MoCo v3 and TIPS.

    Args:
      mask_token: whether the file has a mask token.
      positions: conversion of the position table.
      block: regex of a block's name, with the index of the block as its only group.
      norm_name: name of the last norm.
    """
    return (
        Rule(r"cls_token", "cls_token"),
        *((Rule(r"mask_token", "mask_token"),) if mask_token else ()),
        Rule(r"(?:register_tokens|reg_token)", "register_tokens"),
        Rule(r"pos_embed", "pos_embed", positions),
        *patch_rules(r"patch_embed\.proj"),
        *norm_rules(rf"{block}\.norm([12])", r"blocks/\1/norm\2"),
        *linear_rules(rf"{block}\.attn\.(qkv|proj)", r"blocks/\1/attn/\2"),
        *linear_rules(rf"{block}\.mlp\.(?:fc1|w12|c_fc)", r"blocks/\1/mlp/fc1"),
        *linear_rules(rf"{block}\.mlp\.(?:fc2|w3|c_proj)", r"blocks/\1/mlp/fc2"),
        Rule(rf"{block}\.ls([12])\.gamma", r"blocks/\1/ls\2/gamma"),
        *norm_rules(norm_name, "norm"),
    )


def _hugging_face() -> Rules:
    """Return the common rules of Dinov2, Dinov2WithRegisters, ViT and ViT-MAE in transformers.

    One set of rules is enough, because no name means different tensors in two of these models.
    """
    layer = r"encoder\.layer\.(\d+)"
    return (
        Rule(r"embeddings\.(cls_token|mask_token|register_tokens)", r"\1"),
        Rule(r"embeddings\.position_embeddings", "pos_embed"),
        *patch_rules(r"embeddings\.patch_embeddings\.projection"),
        *norm_rules(rf"{layer}\.norm([12])", r"blocks/\1/norm\2"),
        *norm_rules(rf"{layer}\.layernorm_before", r"blocks/\1/norm1"),
        *norm_rules(rf"{layer}\.layernorm_after", r"blocks/\1/norm2"),
        *fuse_rules(rf"{layer}\.attention\.attention\.PART\."),
        *linear_rules(rf"{layer}\.attention\.output\.dense", r"blocks/\1/attn/proj"),
        *linear_rules(rf"{layer}\.(?:mlp\.fc1|mlp\.weights_in|intermediate\.dense)", r"blocks/\1/mlp/fc1"),
        *linear_rules(rf"{layer}\.(?:mlp\.fc2|mlp\.weights_out|output\.dense)", r"blocks/\1/mlp/fc2"),
        Rule(rf"{layer}\.layer_scale([12])\.lambda1", r"blocks/\1/ls\2/gamma"),
        *norm_rules("layernorm", "norm"),
    )


def flax_block_rules(block: str, attention: str, norm2: str, mlp: str) -> Rules:
    """Return the rules of a transformer's blocks in Flax, with the names of the attention, second norm and MLP.

    `block` is the regex of a block's name, with the index of the block as its only group.
    """
    attention = f"{block}/{attention}"
    return (
        Rule(f"{block}/LayerNorm_0/(scale|bias)", r"blocks/\1/norm1/\2"),
        Rule(f"{block}/{norm2}/(scale|bias)", r"blocks/\1/norm2/\2"),
        # [D, heads, D/heads] -> [D, D], and [heads, D/heads] -> [D]
        *fuse_rules(
            f"{attention}/PART/",
            "kernel",
            lambda tensor: tensor.reshape(tensor.shape[0], -1),
            lambda tensor: tensor.reshape(-1),
        ),
        Rule(f"{attention}/out/kernel", r"blocks/\1/attn/proj/kernel", flatten_rows),
        Rule(f"{attention}/out/bias", r"blocks/\1/attn/proj/bias"),
        Rule(f"{block}/{mlp}/Dense_0/(kernel|bias)", r"blocks/\1/mlp/fc1/\2"),
        Rule(f"{block}/{mlp}/Dense_1/(kernel|bias)", r"blocks/\1/mlp/fc2/\2"),
    )


def _augreg() -> Rules:
    names = "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"
    return (
        Rule("cls", "cls_token"),
        Rule("Transformer/posembed_input/pos_embedding", "pos_embed"),
        Rule("embedding/kernel", "patch_embed/kernel", flatten_rows),
        Rule("embedding/bias", "patch_embed/bias"),
        *flax_block_rules(r"Transformer/encoderblock_(\d+)", *names),
        Rule("Transformer/encoder_norm/(scale|bias)", r"norm/\1"),
    )


OWN = Layout("own", "patch_embed/kernel", (Rule(r"([^.]+)", r"\1"),))
# The classifier, networks of MoCo v3 in addition to its encoder, and the text tower of TIPSv2.
_BESIDE = (
    *(r"head\..*", r"fc_norm\..*", r"pre_logits\..*", r"(?:.*\.)?(?:momentum_encoder|predictor)\..*"),
    *(r"text_encoder\..*", "temperature"),
)
TIMM = Layout("timm", "patch_embed.proj.weight", timm_rules(), _BESIDE, optional=("mask_token",))
# With registers, timm adds the position of the class token to the token, and has no mask token.
TIMM_REGISTERS = Layout(
    "timm_registers", "reg_token", timm_rules(positions=pad_class_position), _BESIDE, optional=("mask_token",)
)
# The whole autoencoder. Its mask token belongs to the decoder.
MAE = Layout("mae", "decoder_embed.weight", timm_rules(mask_token=False), ("mask_token", r"decoder_.*"))
HUGGING_FACE_VIT = Layout(  # also DINOv2
    "hugging_face_vit",
    "encoder.layer.0.attention.attention.query.weight",
    _hugging_face(),
    (r"pooler\..*", r"classifier\..*", r"decoder\..*"),
)
AUGREG = Layout("augreg", "Transformer/encoder_norm/scale", _augreg(), (r"head/.*", r"pre_logits/.*", r"opt/state/.*"))


# ------------------------------------------------------------------------------------------------------------- TIPSv2
FLAX_NAMES = "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"


def _scenic() -> Rules:
    """Return the rules of the vision tower of TIPSv2 in the files for JAX.

    One tensor of the file has two tokens: the class token and a register token. The position of the class token is
    already added to the class token.
    """
    tokens, block = "encoder/ToTokenSequence_0", r"encoder/transformer/encoderblock_(\d+)"
    gated, gate_and_value = f"{block}/FFNSwiGluFused_0", ("Dense_0", "Dense_1")
    unchanged = (identity, identity)
    return (
        Rule(f"{tokens}/cls", "cls_token", lambda tensor: tensor[:, :1]),
        Rule(f"{tokens}/cls", "register_tokens", lambda tensor: tensor[:, 1:]),
        # [1,S,S,D] -> [1,1+S·S,D]
        Rule(
            f"{tokens}/posembed_input",
            "pos_embed",
            lambda tensor: pad_class_position(tensor.reshape(1, -1, tensor.shape[-1])),
        ),
        Rule(f"{tokens}/embedding/kernel", "patch_embed/kernel", flatten_rows),
        Rule(f"{tokens}/embedding/bias", "patch_embed/bias"),
        *flax_block_rules(block, *FLAX_NAMES),
        *fuse_rules(f"{gated}/PART/", "kernel", *unchanged, names=gate_and_value, target=r"blocks/\1/mlp/fc1"),
        Rule(f"{gated}/Dense_2/(kernel|bias)", r"blocks/\1/mlp/fc2/\2"),
        Rule("encoder/encoder_norm/(scale|bias)", r"norm/\1"),
    )


# The authors' model for JAX has neither a mask token nor LayerScale, whose factors stay 1.
TIPS_SCENIC = Layout(
    "tips_scenic",
    "encoder/ToTokenSequence_0/posembed_input",
    _scenic(),
    optional=("mask_token", r"blocks/\d+/ls[12]/gamma"),
)


# ------------------------------------------------------------------------------------------------------------- DINOv3
def _tokens(prefix: str, registers: str, to_mask: Transform) -> Rules:
    return (
        Rule(f"{prefix}cls_token", "cls_token"),
        Rule(f"{prefix}mask_token", "mask_token", to_mask),
        Rule(f"{prefix}{registers}", "register_tokens"),
    )


_LAYER, _BLOCK = r"layer\.(\d+)", r"blocks\.(\d+)"
HUGGING_FACE_DINOV3 = Layout(
    "hugging_face_dinov3",
    "layer.0.attention.q_proj.weight",
    (
        *_tokens(r"embeddings\.", "register_tokens", flatten_rows),
        *patch_rules(r"embeddings\.patch_embeddings"),
        *norm_rules(rf"{_LAYER}\.norm([12])", r"blocks/\1/norm\2"),
        *fuse_rules(rf"{_LAYER}\.attention\.PART_proj\.", names=("q", "k", "v")),
        *linear_rules(rf"{_LAYER}\.attention\.o_proj", r"blocks/\1/attn/proj"),
        *fuse_rules(rf"{_LAYER}\.mlp\.PART\.", names=("gate_proj", "up_proj"), target=r"blocks/\1/mlp/fc1"),
        *linear_rules(rf"{_LAYER}\.mlp\.down_proj", r"blocks/\1/mlp/fc2"),
        Rule(rf"{_LAYER}\.layer_scale([12])\.lambda1", r"blocks/\1/ls\2/gamma"),
        *norm_rules("norm", "norm"),
    ),
    ignored=(r"classifier\..*",),
)
ORIGINAL_DINOV3 = Layout(
    "dinov3",
    "storage_tokens",
    (
        *_tokens("", "storage_tokens", identity),
        *patch_rules(r"patch_embed\.proj"),
        *norm_rules(rf"{_BLOCK}\.norm([12])", r"blocks/\1/norm\2"),
        Rule(rf"{_BLOCK}\.attn\.qkv\.weight", r"blocks/\1/attn/qkv/kernel", transpose),
        # [3D], of queries, keys and values -> [2D] without the keys', which the authors' code multiplies by 0.
        Rule(
            rf"{_BLOCK}\.attn\.qkv\.bias",
            r"blocks/\1/attn/qkv/bias",
            lambda tensor: np.concatenate(np.split(tensor, 3)[::2]),
        ),
        *linear_rules(rf"{_BLOCK}\.attn\.proj", r"blocks/\1/attn/proj"),
        *fuse_rules(rf"{_BLOCK}\.mlp\.PART\.", names=("w1", "(?:fc1|w2)"), target=r"blocks/\1/mlp/fc1"),
        *linear_rules(rf"{_BLOCK}\.mlp\.(?:fc2|w3)", r"blocks/\1/mlp/fc2"),
        Rule(rf"{_BLOCK}\.ls([12])\.gamma", r"blocks/\1/ls\2/gamma"),
        *norm_rules("norm", "norm"),
    ),
    # The mask of the keys' bias, and the frequencies of the rotary positions, which the architecture determines.
    ignored=(rf"{_BLOCK}\.attn\.qkv\.bias_mask", r"rope_embed\.periods"),
)


# ---------------------------------------------------------------------------------------------------- CLIP and SigLIP
def as_class_token(tensor: np.ndarray) -> np.ndarray:
    """Reshape [D] to [1,1,D]."""
    return tensor.reshape(1, 1, -1)


def as_position_table(tensor: np.ndarray) -> np.ndarray:
    """Reshape [T,D] to [1,T,D]."""
    return tensor[None]


def hugging_face_blocks() -> Rules:
    """Return the rules of the blocks that all towers of CLIP and SigLIP in transformers have in common."""
    layer = r"encoder\.layers\.(\d+)"
    return (
        *norm_rules(rf"{layer}\.layer_norm([12])", r"blocks/\1/norm\2"),
        *fuse_rules(rf"{layer}\.self_attn\.PART_proj\.", names=("q", "k", "v")),
        *linear_rules(rf"{layer}\.self_attn\.out_proj", r"blocks/\1/attn/proj"),
        *linear_rules(rf"{layer}\.mlp\.(fc[12])", r"blocks/\1/mlp/\2"),
    )


def _hugging_face_tower() -> Rules:
    """Return the rules that the vision towers of CLIP and SigLIP in transformers have in common."""
    return (
        *patch_rules(r"embeddings\.patch_embedding"),
        Rule(r"embeddings\.position_embedding\.weight", "pos_embed", as_position_table),
        *hugging_face_blocks(),
        *norm_rules("post_layernorm", "norm"),
    )


# The text tower, the scale of similarities, a classifier, and the indices of positions in older files.
_TOWER_BESIDE = (r"text_model\..*", r"logit_(?:scale|bias)", r"classifier\..*", r"embeddings\.position_ids")
HUGGING_FACE_CLIP = Layout(
    "hugging_face_clip",
    "pre_layrnorm.weight",
    (
        Rule(r"embeddings\.class_embedding", "cls_token", as_class_token),
        *_hugging_face_tower(),
        *norm_rules("pre_layrnorm", "norm_pre"),
    ),
    ignored=(*_TOWER_BESIDE, r"(?:visual|text)_projection\.weight"),
)


def openclip_blocks() -> Rules:
    """Return the rules of the blocks that both towers of CLIP have in common in OpenCLIP, and in OpenAI's code."""
    block = r"transformer\.resblocks\.(\d+)"
    return (
        *norm_rules(rf"{block}\.ln_([12])", r"blocks/\1/norm\2"),
        *attention_rules(rf"{block}\.attn", r"blocks/\1/attn"),
        *linear_rules(rf"{block}\.mlp\.c_fc", r"blocks/\1/mlp/fc1"),
        *linear_rules(rf"{block}\.mlp\.c_proj", r"blocks/\1/mlp/fc2"),
    )


OPENCLIP = Layout(
    "openclip",
    "visual.ln_pre.weight",
    nest(
        (
            Rule("class_embedding", "cls_token", as_class_token),
            Rule("positional_embedding", "pos_embed", as_position_table),
            Rule(r"conv1\.weight", "patch_embed/kernel", patch_kernel),
            *norm_rules("ln_pre", "norm_pre"),
            *openclip_blocks(),
            *norm_rules("ln_post", "norm"),
        ),
        r"visual\.",
        "",
    ),
    ignored=(
        r"visual\.proj",
        r"(?:transformer|token_embedding|ln_final)\..*",
        r"positional_embedding|text_projection|logit_(?:scale|bias)|attn_mask",
        r"input_resolution|context_length|vocab_size",
    ),
)
SIGLIP = Layout(
    "hugging_face_siglip",
    "head.probe",
    (
        *_hugging_face_tower(),
        Rule(r"head\.probe", "pool/query"),
        *attention_rules(r"head\.attention", "pool/attn"),
        *norm_rules(r"head\.layernorm", "pool/norm"),
        *linear_rules(r"head\.mlp\.(fc[12])", r"pool/mlp/\1"),
    ),
    ignored=_TOWER_BESIDE,
)

VIT_LAYOUTS = (
    *(HUGGING_FACE_DINOV3, ORIGINAL_DINOV3, SIGLIP, HUGGING_FACE_CLIP, OPENCLIP),
    *(OWN, MAE, TIMM_REGISTERS, TIMM, HUGGING_FACE_VIT, AUGREG, TIPS_SCENIC),
)
