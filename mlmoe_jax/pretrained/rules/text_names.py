"""Layouts of text towers: SigLIP, CLIP in transformers, OpenCLIP, and TIPSv2. Most files have the vision tower too."""

import numpy as np

from mlmoe_jax.models.text.tower import TOKEN_TABLE
from mlmoe_jax.pretrained.rules.base import Layout, Rule, Rules, linear_rules, nest, norm_rules, transpose
from mlmoe_jax.pretrained.rules.vit_names import FLAX_NAMES, flax_block_rules, hugging_face_blocks, openclip_blocks

SCALE, BIAS, PROJECTION = "similarity/scale", "similarity/bias", "similarity/projection"


def as_scale(tensor: np.ndarray) -> np.ndarray:
    """Return the scale of similarities, f32[], from its logarithm in the file, [1] or []."""
    return np.exp(tensor.astype(np.float32)).reshape(())


def as_inverse(tensor: np.ndarray) -> np.ndarray:
    """Return the scale of similarities, f32[], from its inverse in the file, a temperature, [1] or []."""
    return (1 / tensor.astype(np.float32)).reshape(())


def _hugging_face_tower() -> Rules:
    """Return the rules that the text towers of CLIP and SigLIP in transformers have in common."""
    tower = (
        Rule(r"embeddings\.token_embedding\.weight", TOKEN_TABLE),
        Rule(r"embeddings\.position_embedding\.weight", "pos_embed"),
        *hugging_face_blocks(),
        *norm_rules("final_layer_norm", "norm"),
    )
    return (*nest(tower, r"text_model\.", ""), Rule("logit_scale", SCALE, as_scale))


# The vision tower, and the indices of positions in older files.
_BESIDE = (r"vision_model\..*", r"text_model\.embeddings\.position_ids")
_TIPS = (
    Rule(r"token_embedding\.weight", TOKEN_TABLE),
    *openclip_blocks(),
    *norm_rules("ln_final", "norm"),
    Rule("temperature", SCALE, as_inverse),
)
TEXT_LAYOUTS = (
    Layout(
        "hugging_face_siglip_text",
        "text_model.head.weight",
        (
            *_hugging_face_tower(),
            *linear_rules(r"text_model\.head", "proj"),
            Rule("logit_bias", BIAS, lambda tensor: tensor.reshape(())),  # [1] or []
        ),
        ignored=_BESIDE,
    ),
    Layout(
        "hugging_face_clip_text",
        "text_projection.weight",
        (
            *_hugging_face_tower(),
            Rule(r"text_projection\.weight", "proj/kernel", transpose),
            Rule(r"visual_projection\.weight", PROJECTION, transpose),
        ),
        ignored=_BESIDE,
    ),
    # On the Hub, in one file with the vision tower.
    Layout(
        "tips_hub_text",
        "text_encoder.ln_final.weight",
        (*nest(_TIPS[:-1], r"text_encoder\.", ""), _TIPS[-1]),
        ignored=(r"vision_encoder\..*",),
    ),
    Layout("tips_text", "ln_final.weight", _TIPS, required=("temperature",)),
    Layout(
        "tips_scenic_text",
        "token_emb/emb_var",
        (
            Rule("token_emb/emb_var", TOKEN_TABLE),
            *flax_block_rules(r"transformer/encoderblock_(\d+)", *FLAX_NAMES),
            Rule("text_encoder_norm/(scale|bias)", r"norm/\1"),
            Rule("temperature_contrastive", SCALE, as_inverse),
        ),
    ),
    Layout(
        "openclip_text",
        "ln_final.weight",
        (
            Rule(r"token_embedding\.weight", TOKEN_TABLE),
            Rule("positional_embedding", "pos_embed"),
            *openclip_blocks(),
            *norm_rules("ln_final", "norm"),
            Rule("text_projection", "proj/kernel"),
            Rule(r"visual\.proj", PROJECTION),
            Rule("logit_scale", SCALE, as_scale),
        ),
        ignored=(r"visual\..*", "attn_mask", r"input_resolution|context_length|vocab_size"),
    ),
)
