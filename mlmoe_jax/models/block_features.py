"""The tokens of a vision transformer after any of its blocks, and the attention inside any block."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import jax

from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.layers.dispatch import record_attention
from mlmoe_jax.models.outputs import CLS, PATCHES, Features


def block_features(
    backbone: ViT, image: jax.Array, blocks: Collection[int], *, norm: bool = True, return_attention: bool = False
) -> dict[int, Features]:
    """Encode images without prompts and return the features after each of `blocks`.

    Args:
      backbone: a vision transformer, such as `load_backbone("vit_digits")` or the `backbone` of a model.
      image: f32[B,H,W,3], normalized.
      blocks: indices of blocks, counted from 0. The computation stops after the largest index.
      norm: apply the final LayerNorm, as the backbone does after its last block.

    Returns:
      {block: Features} with `patches` f32[B,N,D] and, if the backbone has a class token, `cls` f32[B,D]. With
      `return_attention`, `Features.attention` has the attention weights inside the block over the N patches, averaged
      over heads: `patches` f32[B,N,N] with patches as queries, and, if there is a class token, `cls` f32[B,1,N].

    Raises:
      ValueError: the backbone is not a ViT, a block does not exist, or a side of the images is not a multiple of the
        patch size.
    """
    if not isinstance(backbone, ViT):
        raise ValueError(f"a {type(backbone).__name__} has no transformer blocks; give a ViT")
    depth = backbone.shape.depth
    leading = backbone.shape.leading
    if unknown := sorted(set(blocks) - set(range(depth))):
        raise ValueError(f"there is no block {unknown[0]}; the blocks are numbered from 0 to {depth - 1}")
    tokens, grid = backbone.embed(image)
    rotary = backbone.rotary(grid)
    features = {}
    for index in range(max(blocks, default=-1) + 1):
        explains, attention = return_attention and index in blocks, {}
        with record_attention() if explains else contextlib.nullcontext(()) as recorded:
            tokens = backbone.blocks[index](tokens, rotary=rotary)
        for weights in recorded:
            weights = weights.mean(axis=1)[..., leading:]
            attention[PATCHES] = weights[:, leading:]
            attention |= {CLS: weights[:, :1]} if backbone.shape.class_token else {}
        if index in blocks:
            read = backbone.norm(tokens) if norm else tokens
            cls = read[:, 0] if backbone.shape.class_token else None
            features[index] = Features(cls, None, read[:, leading:], grid, attention)
    return features
