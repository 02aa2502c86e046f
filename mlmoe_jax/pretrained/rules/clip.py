"""Layouts of CLIP (Hugging Face's and OpenCLIP's) and of SigLIP; of the whole model, only the vision tower is read."""

import numpy as np

from mlmoe_jax.pretrained.rules.base import Rule, Source, linear, nested, norm, patch_kernel
from mlmoe_jax.pretrained.rules.query import attention
from mlmoe_jax.pretrained.rules.vit import fused


def token(tensor: np.ndarray) -> np.ndarray:
    """[D] -> [1,1,D]."""
    return tensor.reshape(1, 1, -1)


def table(tensor: np.ndarray) -> np.ndarray:
    """[T,D] -> [1,T,D]."""
    return tensor[None]


def hugging_face_tower() -> tuple[Rule, ...]:
    """Return the rules that the vision towers of CLIP and SigLIP share."""
    layer = r"encoder\.layers\.(\d+)"
    return (
        Rule(r"embeddings\.patch_embedding\.weight", "patch_embed/kernel", patch_kernel),
        Rule(r"embeddings\.patch_embedding\.bias", "patch_embed/bias"),
        Rule(r"embeddings\.position_embedding\.weight", "pos_embed", table),
        *norm(rf"{layer}\.layer_norm([12])", r"blocks/\1/norm\2"),
        *fused(rf"{layer}\.self_attn\.QKV_proj\.", names=("q", "k", "v")),
        *linear(rf"{layer}\.self_attn\.out_proj", r"blocks/\1/attn/proj"),
        *linear(rf"{layer}\.mlp\.(fc[12])", r"blocks/\1/mlp/\2"),
        *norm("post_layernorm", "norm"),
    )


# The tower for texts, the numbers that scale similarities, a classifier, and positions that older files count out.
HUGGING_FACE_BESIDE = (r"text_model\..*", r"logit_(?:scale|bias)", r"classifier\..*", r"embeddings\.position_ids")
HUGGING_FACE = Source(
    "hugging_face_clip",
    "pre_layrnorm.weight",
    (
        Rule(r"embeddings\.class_embedding", "cls_token", token),
        *hugging_face_tower(),
        *norm("pre_layrnorm", "norm_pre"),
    ),
    ignored=(*HUGGING_FACE_BESIDE, r"(?:visual|text)_projection\.weight"),
)

_BLOCK = r"transformer\.resblocks\.(\d+)"
OPENCLIP = Source(
    "openclip",
    "visual.ln_pre.weight",
    nested(
        (
            Rule("class_embedding", "cls_token", token),
            Rule("positional_embedding", "pos_embed", table),
            Rule(r"conv1\.weight", "patch_embed/kernel", patch_kernel),
            *norm("ln_pre", "norm_pre"),
            *norm(rf"{_BLOCK}\.ln_([12])", r"blocks/\1/norm\2"),
            *attention(rf"{_BLOCK}\.attn", r"blocks/\1/attn"),
            *linear(rf"{_BLOCK}\.mlp\.c_fc", r"blocks/\1/mlp/fc1"),
            *linear(rf"{_BLOCK}\.mlp\.c_proj", r"blocks/\1/mlp/fc2"),
            *norm("ln_post", "norm"),
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
SIGLIP = Source(
    "hugging_face_siglip",
    "head.probe",
    (
        *hugging_face_tower(),
        Rule(r"head\.probe", "pool/query"),
        *attention(r"head\.attention", "pool/attn"),
        *norm(r"head\.layernorm", "pool/norm"),
        *linear(r"head\.mlp\.(fc[12])", r"pool/mlp/\1"),
    ),
    ignored=HUGGING_FACE_BESIDE,
)
SOURCES = (SIGLIP, HUGGING_FACE, OPENCLIP)
