"""ViT layouts: our own, the original DINOv2 / timm one, and Hugging Face's DINOv2."""

from mlmoe_jax.pretrained.rules.base import Rule, Source, patch_kernel, transpose


def timm_rules(block: str = r"blocks\.(\d+)") -> tuple[Rule, ...]:
    """Return the rules of the layout that timm and the DINOv2 repository use; `block` matches a block's prefix."""
    return (
        Rule(r"cls_token", "cls_token"),
        Rule(r"mask_token", "mask_token"),
        Rule(r"pos_embed", "pos_embed"),
        Rule(r"patch_embed\.proj\.weight", "patch_embed/kernel", patch_kernel),
        Rule(r"patch_embed\.proj\.bias", "patch_embed/bias"),
        Rule(rf"{block}\.norm([12])\.weight", r"blocks/\1/norm\2/scale"),
        Rule(rf"{block}\.norm([12])\.bias", r"blocks/\1/norm\2/bias"),
        Rule(rf"{block}\.attn\.(qkv|proj)\.weight", r"blocks/\1/attn/\2/kernel", transpose),
        Rule(rf"{block}\.attn\.(qkv|proj)\.bias", r"blocks/\1/attn/\2/bias"),
        Rule(rf"{block}\.mlp\.(fc[12])\.weight", r"blocks/\1/mlp/\2/kernel", transpose),
        Rule(rf"{block}\.mlp\.(fc[12])\.bias", r"blocks/\1/mlp/\2/bias"),
        Rule(rf"{block}\.ls([12])\.gamma", r"blocks/\1/ls\2/gamma"),
        Rule(r"norm\.weight", "norm/scale"),
        Rule(r"norm\.bias", "norm/bias"),
    )


def _hugging_face_dinov2() -> tuple[Rule, ...]:
    layer, attention = r"encoder\.layer\.(\d+)", r"encoder\.layer\.(\d+)\.attention"
    return (
        Rule(r"embeddings\.cls_token", "cls_token"),
        Rule(r"embeddings\.mask_token", "mask_token"),
        Rule(r"embeddings\.position_embeddings", "pos_embed"),
        Rule(r"embeddings\.patch_embeddings\.projection\.weight", "patch_embed/kernel", patch_kernel),
        Rule(r"embeddings\.patch_embeddings\.projection\.bias", "patch_embed/bias"),
        Rule(rf"{layer}\.norm([12])\.weight", r"blocks/\1/norm\2/scale"),
        Rule(rf"{layer}\.norm([12])\.bias", r"blocks/\1/norm\2/bias"),
        *(
            rule
            for part, name in enumerate(("query", "key", "value"))
            for rule in (
                Rule(rf"{attention}\.attention\.{name}\.weight", r"blocks/\1/attn/qkv/kernel", transpose, part),
                Rule(rf"{attention}\.attention\.{name}\.bias", r"blocks/\1/attn/qkv/bias", part=part),
            )
        ),
        Rule(rf"{attention}\.output\.dense\.weight", r"blocks/\1/attn/proj/kernel", transpose),
        Rule(rf"{attention}\.output\.dense\.bias", r"blocks/\1/attn/proj/bias"),
        Rule(rf"{layer}\.layer_scale([12])\.lambda1", r"blocks/\1/ls\2/gamma"),
        Rule(rf"{layer}\.mlp\.(fc[12])\.weight", r"blocks/\1/mlp/\2/kernel", transpose),
        Rule(rf"{layer}\.mlp\.(fc[12])\.bias", r"blocks/\1/mlp/\2/bias"),
        Rule(r"layernorm\.weight", "norm/scale"),
        Rule(r"layernorm\.bias", "norm/bias"),
    )


OWN = Source("own", "patch_embed/kernel", (Rule(r"([^.]+)", r"\1"),))
TIMM = Source("timm", "patch_embed.proj.weight", timm_rules(), ignored=(r"head\..*", r"fc_norm\..*"))
HUGGING_FACE_DINOV2 = Source(
    "hugging_face_dinov2", "embeddings.patch_embeddings.projection.weight", _hugging_face_dinov2()
)
