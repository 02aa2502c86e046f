"""Vision transformers: one implementation for every ViT of the papers, with deep prompts on their exact fast path.

A deep prompt is replaced before every block. So in every block but the last it acts only as a key and a value, and
these do not depend on the image: they are computed once a batch, and no query and no MLP is spent on a prompt. In the
last block only the tokens that the head reads ask. Outputs and gradients are those of running every token through
every block; the prompt-to-prompt mask can only matter where prompts ask, in the last block.
"""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.contracts import CLS, PATCHES, PROMPTS, Features, Prompts
from mlmoe_jax.models.positions import resample_positions, sine_positions
from mlmoe_jax.models.transformer import Block, hidden_width, layer_norm

REGISTERS = "registers"


@dataclasses.dataclass(frozen=True)
class ViTShape:
    """The architecture of a ViT; `native` is the image size that the position table was made for, in pixels.

    registers: tokens without a position that only pass information on (Darcet et al., 2024); no head reads them.
    position_offset, position_antialias: how the source resamples its table to another grid (see resample_positions).
    """

    width: int
    depth: int
    heads: int
    patch: int
    native: int
    mlp_ratio: float = 4.0
    mlp: str = "gelu"  # gelu | swiglu
    eps: float = 1e-6
    layer_scale: float | None = None
    mask_token: bool = False  # an unused tensor of some published files, kept so that counts and files agree
    position_offset: float = 0.0
    position_antialias: bool = False
    registers: int = 0


class ViT(nnx.Module):
    """A ViT encoder; parameters carry the names of the published PyTorch files (`blocks/3/attn/qkv/kernel`).

    dtype: of matrix products and of what lies between them inside a block; parameters, positions, LayerNorm, softmax
    and the residual stream stay float32. remat: the backward pass computes each block again instead of keeping what is
    inside it: the memory of one block, for about a third more time.
    """

    def __init__(self, shape: ViTShape, *, dtype: jnp.dtype | None = None, remat: bool = False, rngs: nnx.Rngs):
        self.shape, self.remat = shape, remat
        normal = nnx.initializers.truncated_normal(0.02)
        self.patch_embed = nnx.Linear(3 * shape.patch**2, shape.width, dtype=dtype, rngs=rngs)
        self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, shape.width)))
        side = shape.native // shape.patch
        # Trained from scratch, a table that starts as sines and cosines learns several times faster than a random one.
        self.pos_embed = nnx.Param(jnp.pad(sine_positions(side, shape.width), ((0, 0), (1, 0), (0, 0))))
        if shape.mask_token:
            self.mask_token = nnx.Param(jnp.zeros((1, shape.width)))
        if shape.registers:
            self.register_tokens = nnx.Param(normal(rngs.params(), (1, shape.registers, shape.width)))
        self.blocks = nnx.List(
            Block(
                shape.width,
                shape.heads,
                hidden_width(shape.width, shape.mlp_ratio, shape.mlp),
                mlp=shape.mlp,
                eps=shape.eps,
                layer_scale=shape.layer_scale,
                dtype=dtype,
                rngs=rngs,
            )
            for _ in range(shape.depth)
        )
        self.norm = layer_norm(shape.width, shape.eps, rngs)

    def embed(self, image: jax.Array) -> tuple[jax.Array, tuple[int, int]]:
        """Cut f32[B,H,W,3] into patches; return the tokens and the patch grid.

        Tokens are f32[B,1+R+N,D]: the class token, R registers, the patches.
        """
        patch = self.shape.patch
        batch, height, width, _ = image.shape
        if height % patch or width % patch:
            raise ValueError(f"images of {height}×{width} pixels are no multiple of the patch size {patch}")
        rows, columns = height // patch, width // patch
        pieces = image.reshape(batch, rows, patch, columns, patch, 3).swapaxes(2, 3)
        tokens = self.patch_embed(pieces.reshape(batch, rows * columns, -1))
        table = self.pos_embed[...]
        position = resample_positions(
            table[:, 1:],
            (rows, columns),
            offset=self.shape.position_offset,
            antialias=self.shape.position_antialias,
        )
        first = self.cls_token[...] + table[:, :1]
        if self.shape.registers:
            first = jnp.concatenate([first, self.register_tokens[...]], axis=1)
        first = jnp.broadcast_to(first, (batch, *first.shape[1:]))
        return jnp.concatenate([first, tokens + position], axis=1), (rows, columns)

    def __call__(
        self, image: jax.Array, prompts: Prompts | None = None, *, read: Collection[str] = (CLS,), norm: bool = True
    ) -> Features:
        """Encode f32[B,H,W,3].

        read: which of cls, prompts, patches the head will use. norm: apply the final LayerNorm to them.
        Raises ValueError where the image is no multiple of the patch, or prompts are read that were not given.
        """
        unknown = set(read) - {CLS, PROMPTS, PATCHES}
        if unknown or not read or (PROMPTS in read and prompts is None):
            raise ValueError(f"cannot read {sorted(read)} {'without prompts' if prompts is None else ''}")
        tokens, grid = self.embed(image)
        for index in range(self.shape.depth - 1):
            context = [] if prompts is None else [prompts.tokens[index]]
            tokens = self._advance(index, tokens, context)
        parts = self._last_block(tokens, prompts, read)
        if norm:
            parts = {name: self.norm(part) for name, part in parts.items()}
        cls = parts.get(CLS)
        return Features(None if cls is None else cls[:, 0], parts.get(PROMPTS), parts.get(PATCHES), grid)

    def _advance(
        self, index: int, tokens: jax.Array, context: list[jax.Array], mask: np.ndarray | None = None
    ) -> jax.Array:
        """Run a block (see Block)."""

        def run(tokens: jax.Array, context: list[jax.Array]) -> jax.Array:
            return self.blocks[index](tokens, context, mask)

        return (jax.checkpoint(run) if self.remat else run)(tokens, context)

    def _last_block(self, tokens: jax.Array, prompts: Prompts | None, read: Collection[str]) -> dict[str, jax.Array]:
        """Advance only the tokens in `read`; all others are context."""
        first = 1 + self.shape.registers
        parts = {CLS: tokens[:, :1], PATCHES: tokens[:, first:]}
        if self.shape.registers:
            parts[REGISTERS] = tokens[:, 1:first]
        if prompts is not None:
            parts = {PROMPTS: prompts.tokens[-1], **parts}
        asking = {name: part for name, part in parts.items() if name in read}
        context = [part for name, part in parts.items() if name not in read]
        sizes = {name: part.shape[1] for name, part in asking.items()}
        mask = None
        if PROMPTS in asking and prompts.mask is not None:
            mask = np.ones((sum(sizes.values()), sum(part.shape[1] for part in parts.values())), bool)
            mask[: sizes[PROMPTS], : sizes[PROMPTS]] = prompts.mask
        batch = max(part.shape[0] for part in asking.values())
        joined = jnp.concatenate([jnp.broadcast_to(p, (batch, *p.shape[1:])) for p in asking.values()], axis=1)
        advanced = self._advance(self.shape.depth - 1, joined, context, mask)
        pieces = jnp.split(advanced, np.cumsum(list(sizes.values()))[:-1], axis=1)
        return dict(zip(sizes, pieces, strict=True))
