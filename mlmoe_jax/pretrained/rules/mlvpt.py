"""State dicts of prompt-tuned ViTs: ML-VPT as a whole; VPT, E2VPT and GateVPT as far as their backbone goes."""

from mlmoe_jax.pretrained.rules.base import Rule, Source, nested, token_set
from mlmoe_jax.pretrained.rules.vit import fused, linear, norm, patches, timm_rules

_SIDES = (("co", "co"), ("cl", "dc"))  # `cl` is what the paper calls DC

_ML_VPT = (
    *nested(timm_rules(), r"img_encoder\.", "backbone/"),
    Rule(r"img_encoder\.prompt_embeddings", "prompts/deep", token_set, part=0, axis=0),
    Rule(r"img_encoder\.deep_prompt_embeddings", "prompts/deep", token_set, part=1, axis=0),
    Rule(r"adapt_experts\.W1", "head/bank/up/kernel"),
    Rule(r"adapt_experts\.b1", "head/bank/up/bias"),
    Rule(r"adapt_experts\.W2", "head/bank/down/kernel"),
    Rule(r"adapt_experts\.b2", "head/bank/down/bias"),
    # gate rows are e·K + k, which is [M,K] flattened
    *(Rule(rf"{theirs}_gate\.W", f"head/{ours}/gate/kernel", reshape=True) for theirs, ours in _SIDES),
    *(Rule(rf"{theirs}_gate\.b", f"head/{ours}/gate/bias", reshape=True) for theirs, ours in _SIDES),
    *(Rule(rf"{theirs}_fc\.W", f"head/{ours}/classifier/kernel", reshape=True) for theirs, ours in _SIDES),
    *(Rule(rf"{theirs}_fc\.b", f"head/{ours}/classifier/bias", reshape=True) for theirs, ours in _SIDES),
)
ML_VPT_DINOV2 = Source("ml_vpt_dinov2", "img_encoder.blocks.0.0.ls1.gamma", _ML_VPT)
# On the supervised ViT-B/16, MAE and MoCo v3.
ML_VPT = Source("ml_vpt", "adapt_experts.W1", _ML_VPT)


def vpt_rules() -> tuple[Rule, ...]:
    """Return the rules of the backbone in the VPT code, from which E2VPT comes."""
    layer = r"encoder\.layer\.(\d+)"
    return (
        Rule(r"embeddings\.cls_token", "cls_token"),
        Rule(r"embeddings\.position_embeddings", "pos_embed"),
        *patches(r"embeddings\.patch_embeddings"),
        *norm(rf"{layer}\.attention_norm", r"blocks/\1/norm1"),
        *norm(rf"{layer}\.ffn_norm", r"blocks/\1/norm2"),
        *fused(rf"{layer}\.attn\.QKV\."),
        *linear(rf"{layer}\.attn\.out", r"blocks/\1/attn/proj"),
        *linear(rf"{layer}\.ffn\.(fc[12])", r"blocks/\1/mlp/\2"),
        *norm(r"encoder\.encoder_norm", "norm"),
    )


VPT = Source(
    "vpt",
    "transformer.encoder.encoder_norm.weight",
    nested(vpt_rules(), r"transformer\.", ""),
    (
        r"head\..*",
        r"transformer\.(?:deep_)?prompt_embeddings",
        r"transformer\.prompt_soft_tokens.*",
        r"transformer\.encoder\.layer\.\d+\.attn\.deep_QKV_embeddings",
    ),
)
GATE_VPT = Source(
    "gate_vpt", "prompt_embeddings", timm_rules(), (r"head\..*", "prompt_embeddings", "gate_logit", "temp")
)
SOURCES = (ML_VPT_DINOV2, ML_VPT, VPT, GATE_VPT)
