"""ViT layouts: our own, timm's and the original DINOv2's, MAE's, Hugging Face's, and the Flax one of AugReg."""

from mlmoe_jax.pretrained.rules.base import (
    Rule,
    Source,
    Transform,
    flat,
    flat_columns,
    flat_rows,
    linear,
    norm,
    patch_kernel,
    same,
    transpose,
    without_class_position,
)

# `blocks.3`, or `blocks.0.3` in files of a model whose blocks were grouped into chunks.
BLOCK, CHUNKED_BLOCK = r"blocks\.(?:\d+\.)?(\d+)", r"blocks\.0\.(\d+)"


def patches(theirs: str) -> tuple[Rule, Rule]:
    """Return the rules of a PyTorch patch convolution."""
    return (
        Rule(rf"{theirs}\.weight", "patch_embed/kernel", patch_kernel),
        Rule(rf"{theirs}\.bias", "patch_embed/bias"),
    )


def fused(
    theirs: str,
    kernel: str = "weight",
    to_matrix: Transform = transpose,
    to_vector: Transform = same,
    *,
    names: tuple[str, str, str] = ("query", "key", "value"),
) -> tuple[Rule, ...]:
    """Return the rules that fuse separate query, key and value layers; QKV in `theirs` stands for each of `names`."""
    rules = []
    for part, name in enumerate(names):
        layer, place = theirs.replace("QKV", name), {"at": (part,), "axes": (-1,)}
        rules.append(Rule(f"{layer}{kernel}", r"blocks/\1/attn/qkv/kernel", to_matrix, **place))
        rules.append(Rule(f"{layer}bias", r"blocks/\1/attn/qkv/bias", to_vector, **place))
    return tuple(rules)


def timm_rules(
    mask_token: bool = True, positions: Transform = same, block: str = BLOCK, norm_name: str = "norm"
) -> tuple[Rule, ...]:
    """Return the rules of the layout that timm and the repositories of DINOv2, MAE and MoCo v3 use.

    block: the pattern of a block, with the block's index as its only group. norm_name: the name of the last norm.
    """
    return (
        Rule(r"cls_token", "cls_token"),
        *((Rule(r"mask_token", "mask_token"),) if mask_token else ()),
        Rule(r"(?:register_tokens|reg_token)", "register_tokens"),
        Rule(r"pos_embed", "pos_embed", positions),
        *patches(r"patch_embed\.proj"),
        *norm(rf"{block}\.norm([12])", r"blocks/\1/norm\2"),
        *linear(rf"{block}\.attn\.(qkv|proj)", r"blocks/\1/attn/\2"),
        *linear(rf"{block}\.mlp\.(?:fc1|w12)", r"blocks/\1/mlp/fc1"),
        *linear(rf"{block}\.mlp\.(?:fc2|w3)", r"blocks/\1/mlp/fc2"),
        Rule(rf"{block}\.ls([12])\.gamma", r"blocks/\1/ls\2/gamma"),
        *norm(norm_name, "norm"),
    )


def _hugging_face() -> tuple[Rule, ...]:
    """Return the rules of Dinov2, Dinov2WithRegisters, ViT and ViT-MAE, whose names do not collide."""
    layer = r"encoder\.layer\.(\d+)"
    return (
        Rule(r"embeddings\.(cls_token|mask_token|register_tokens)", r"\1"),
        Rule(r"embeddings\.position_embeddings", "pos_embed"),
        *patches(r"embeddings\.patch_embeddings\.projection"),
        *norm(rf"{layer}\.norm([12])", r"blocks/\1/norm\2"),
        *norm(rf"{layer}\.layernorm_before", r"blocks/\1/norm1"),
        *norm(rf"{layer}\.layernorm_after", r"blocks/\1/norm2"),
        *fused(rf"{layer}\.attention\.attention\.QKV\."),
        *linear(rf"{layer}\.attention\.output\.dense", r"blocks/\1/attn/proj"),
        *linear(rf"{layer}\.(?:mlp\.fc1|mlp\.weights_in|intermediate\.dense)", r"blocks/\1/mlp/fc1"),
        *linear(rf"{layer}\.(?:mlp\.fc2|mlp\.weights_out|output\.dense)", r"blocks/\1/mlp/fc2"),
        Rule(rf"{layer}\.layer_scale([12])\.lambda1", r"blocks/\1/ls\2/gamma"),
        *norm("layernorm", "norm"),
    )


def _augreg() -> tuple[Rule, ...]:
    block = r"Transformer/encoderblock_(\d+)"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    return (
        Rule("cls", "cls_token"),
        Rule("Transformer/posembed_input/pos_embedding", "pos_embed"),
        Rule("embedding/kernel", "patch_embed/kernel", flat_rows),
        Rule("embedding/bias", "patch_embed/bias"),
        Rule(f"{block}/LayerNorm_0/(scale|bias)", r"blocks/\1/norm1/\2"),
        Rule(f"{block}/LayerNorm_2/(scale|bias)", r"blocks/\1/norm2/\2"),
        *fused(f"{attention}/QKV/", "kernel", flat_columns, flat),
        Rule(f"{attention}/out/kernel", r"blocks/\1/attn/proj/kernel", flat_rows),
        Rule(f"{attention}/out/bias", r"blocks/\1/attn/proj/bias"),
        Rule(f"{block}/MlpBlock_3/Dense_0/(kernel|bias)", r"blocks/\1/mlp/fc1/\2"),
        Rule(f"{block}/MlpBlock_3/Dense_1/(kernel|bias)", r"blocks/\1/mlp/fc2/\2"),
        Rule("Transformer/encoder_norm/(scale|bias)", r"norm/\1"),
    )


OWN = Source("own", "patch_embed/kernel", (Rule(r"([^.]+)", r"\1"),))
# The classifier, and the networks that MoCo v3 trained in addition to its encoder.
_BESIDE = (r"head\..*", r"fc_norm\..*", r"pre_logits\..*", r"(?:.*\.)?(?:momentum_encoder|predictor)\..*")
TIMM = Source("timm", "patch_embed.proj.weight", timm_rules(), _BESIDE, optional=("mask_token",))
# With registers, timm adds the class token's position to the token and drops the mask token.
TIMM_REGISTERS = Source(
    "timm_registers", "reg_token", timm_rules(positions=without_class_position), _BESIDE, optional=("mask_token",)
)
# The whole autoencoder: its mask token is the decoder's.
MAE = Source("mae", "decoder_embed.weight", timm_rules(mask_token=False), ("mask_token", r"decoder_.*"))
HUGGING_FACE_DINOV2 = Source(
    "hugging_face_dinov2", "encoder.layer.0.norm1.weight", _hugging_face(), (r"classifier\..*",)
)
HUGGING_FACE_VIT = Source(
    "hugging_face_vit",
    "encoder.layer.0.layernorm_before.weight",
    _hugging_face(),
    (r"pooler\..*", r"classifier\..*", r"decoder\..*"),
)
AUGREG = Source("augreg", "Transformer/encoder_norm/scale", _augreg(), (r"head/.*", r"pre_logits/.*", r"opt/state/.*"))
SOURCES = (OWN, MAE, TIMM_REGISTERS, TIMM, HUGGING_FACE_DINOV2, HUGGING_FACE_VIT, AUGREG)
