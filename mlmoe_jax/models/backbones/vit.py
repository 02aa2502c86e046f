"""Vision transformers: one implementation of all ViTs in the papers, with an exact fast path for deep prompts.

Deep prompts are replaced before every block. In every block but the last, a prompt therefore provides only a key and a
value, which do not depend on the image: they are computed once per batch, without queries and without the MLP. In the
last block, only the tokens that the head reads are queries. Outputs and gradients equal those of running all tokens
through all blocks; the prompt mask matters only in the last block, where prompts are queries. Prompts that are carried
from block to block (`Prompts.carry`) are queries in all blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.backbones.entry import IMAGENET_MEAN, IMAGENET_STD, Entry
from mlmoe_jax.models.contracts import CLS, MEAN, PATCHES, PROMPTS, BackboneShape, Features, Prompts
from mlmoe_jax.models.layers.positions import resample_positions, sine_positions
from mlmoe_jax.models.layers.transformer import Block, hidden_width, layer_norm

IMAGE, REGISTERS = "image", "registers"  # parts of the sequence that heads do not read


@dataclasses.dataclass(frozen=True)
class ViTShape(BackboneShape):
    """The architecture of a ViT; `native` is the image size of the position table, in pixels.

    registers: number of register tokens (Darcet et al., 2024), which have no position and are not read by heads.
    position_offset, position_antialias: how the authors' code resamples its table to another grid (see
    resample_positions).
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
    mask_token: bool = False  # an unused tensor of some published files, kept so that parameter counts agree
    position_offset: float = 0.0
    position_antialias: bool = False
    registers: int = 0

    takes_prompts = True

    def build(
        self, *, dtype: jnp.dtype | None = None, remat: bool = False, batch_norm: str = "frozen", rngs: nnx.Rngs
    ) -> ViT:
        """Build the ViT with random weights; it has no batch normalization."""
        return ViT(self, dtype=dtype, remat=remat, rngs=rngs)

    def published_macs(self, side: int, prompts: nnx.Module | None) -> tuple[int, int, int]:
        """Return linear layers with 4·tokens·D per LayerNorm; the attention products; and N.

        All tokens are counted in all blocks, as in the papers; the fast path computes less.
        """
        patches, width, tokens = (side // self.patch) ** 2, self.width, self._tokens(side, prompts)
        further = 0 if prompts is None else prompts.key_values
        mlp = (3 if self.mlp == "swiglu" else 2) * width * hidden_width(width, self.mlp_ratio, self.mlp)
        linear = patches * 3 * self.patch**2 * width + self.depth * tokens * (4 * width**2 + mlp)
        norms = self.norm_macs(side, prompts)
        return linear + norms, self.depth * 2 * tokens * (tokens + further) * width, patches

    def norm_macs(self, side: int, prompts: nnx.Module | None) -> int:
        """Return 4·tokens·D per LayerNorm."""
        return (2 * self.depth + 1) * 4 * self._tokens(side, prompts) * self.width

    def _tokens(self, side: int, prompts: nnx.Module | None) -> int:
        """Return the number of tokens in a block: class token, registers, prompts and patches."""
        return 1 + self.registers + (0 if prompts is None else prompts.count) + (side // self.patch) ** 2


class ViT(nnx.Module):
    """A ViT encoder; its parameters are named as in the published PyTorch files (`blocks/3/attn/qkv/kernel`).

    dtype: of matrix products and the arrays between them inside a block; parameters, positions, LayerNorm, softmax and
    the residual stream are always float32. remat: recompute each block in the backward pass instead of storing its
    activations: activation memory of one block, for about a third more time.
    """

    def __init__(self, shape: ViTShape, *, dtype: jnp.dtype | None = None, remat: bool = False, rngs: nnx.Rngs):
        self.shape, self.remat = shape, remat
        normal = nnx.initializers.truncated_normal(0.02)
        self.patch_embed = nnx.Linear(3 * shape.patch**2, shape.width, dtype=dtype, rngs=rngs)
        self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, shape.width)))
        side = shape.native // shape.patch
        # Sines and cosines as initial table make training from scratch several times faster than random values.
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
        """Split f32[B,H,W,3] into patches; return the tokens and the patch grid.

        Tokens are f32[B,1+R+N,D]: the class token, R registers, the patches. Raises ValueError if the sides of the
        image are not multiples of the patch size.
        """
        patch = self.shape.patch
        batch, height, width, _ = image.shape
        if height % patch or width % patch:
            raise ValueError(f"images of {height}×{width} pixels are not a multiple of the patch size {patch}")
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
        self,
        image: jax.Array,
        prompts: Prompts | None = None,
        *,
        read: Collection[str] = (CLS,),
        norm: bool = True,
        return_attention: bool = False,
    ) -> Features:
        """Encode f32[B,H,W,3].

        read: which of `cls`, `prompts`, `patches` and `mean` the head reads. norm: apply the final LayerNorm to them.
        return_attention: also return the attention of `cls` and `prompts` to the patches, if they are read.
        Raises ValueError if the sides of the image are not multiples of the patch size, or if prompts are read but not
        given.
        """
        unknown = set(read) - {CLS, PROMPTS, PATCHES, MEAN}
        if unknown or not read or (PROMPTS in read and prompts is None):
            raise ValueError(f"cannot read {sorted(read)} {'without prompts' if prompts is None else ''}")
        tokens, grid = self.embed(image)
        parts = {IMAGE: tokens} | ({} if prompts is None else {PROMPTS: prompts.tokens[0]})
        for index in range(self.shape.depth - 1):
            if prompts is None or prompts.carry is None:
                parts |= self._block(index, parts, (IMAGE,), prompts)
                parts |= {} if prompts is None else {PROMPTS: prompts.tokens[index + 1]}
            else:
                advanced = self._block(index, parts, (PROMPTS, IMAGE), prompts)
                kept = prompts.carry[index]
                parts = advanced | {PROMPTS: kept * advanced[PROMPTS] + (1 - kept) * parts[PROMPTS]}
        first = 1 + self.shape.registers
        tokens = parts.pop(IMAGE)
        parts |= {CLS: tokens[:, :1], REGISTERS: tokens[:, 1:first], PATCHES: tokens[:, first:]}
        asked = [name for name in parts if name in read]
        queries = [name for name in parts if name in asked or (MEAN in read and name in (PROMPTS, PATCHES))]
        attention = self._attention(parts, asked, prompts) if return_attention else {}
        parts = self._block(self.shape.depth - 1, parts, queries, prompts)
        parts |= {MEAN: _mean(parts, prompts)} if MEAN in read else {}
        parts = {name: self.norm(part) if norm else part for name, part in parts.items() if name in read}
        cls = None if CLS not in parts else parts[CLS][:, 0]
        return Features(cls, parts.get(PROMPTS), parts.get(PATCHES), grid, attention, parts.get(MEAN))

    def _block(
        self, index: int, parts: dict[str, jax.Array], queries: Sequence[str], prompts: Prompts | None
    ) -> dict[str, jax.Array]:
        """Apply a block to the parts in `queries`; the others are context. Each part is f32[B or 1, T, D]."""
        joined, context, settings = _arranged(index, parts, queries, prompts)

        def run(tokens: jax.Array, context: list[jax.Array]) -> jax.Array:
            return self.blocks[index](tokens, context, **settings)

        advanced = (jax.checkpoint(run) if self.remat else run)(joined, context)
        ends = np.cumsum([parts[name].shape[1] for name in queries])[:-1]
        return dict(zip(queries, jnp.split(advanced, ends, axis=1), strict=True))

    def _attention(
        self, parts: dict[str, jax.Array], queries: Sequence[str], prompts: Prompts | None
    ) -> dict[str, jax.Array]:
        """Return the attention of `cls` and `prompts`, if in `queries`, over patches in the last block: f32[B,Q,N]."""
        names = [name for name in queries if name != PATCHES]
        if not names:
            return {}
        last = self.shape.depth - 1
        tokens, context, settings = _arranged(last, parts, names, prompts)
        weights = self.blocks[last].weights(tokens, context, **settings).mean(axis=1)
        places = _places(parts, names)
        return {name: weights[:, places[name], places[PATCHES]] for name in names}


def _mean(parts: dict[str, jax.Array], prompts: Prompts | None) -> jax.Array:
    """Return the mean f32[B,D] over the prompts that are present, if there are any, and the patches."""
    patches = parts[PATCHES]
    if prompts is None:
        return patches.mean(axis=1)
    averaged = parts[PROMPTS]
    present = jnp.ones(averaged.shape[1], bool) if prompts.present is None else prompts.present
    total = averaged.sum(axis=1, where=present[:, None]) + patches.sum(axis=1)
    return total / (present.sum() + patches.shape[1])


def _arranged(
    index: int, parts: dict[str, jax.Array], queries: Sequence[str], prompts: Prompts | None
) -> tuple[jax.Array, list[jax.Array], dict[str, Any]]:
    """Return the arguments of block `index` for queries from the parts in `queries`: tokens, context, and settings."""
    context = [part for name, part in parts.items() if name not in queries and part.shape[1]]
    batch = max(parts[name].shape[0] for name in queries)
    joined = jnp.concatenate(
        [jnp.broadcast_to(parts[name], (batch, *parts[name].shape[1:])) for name in queries], axis=1
    )
    settings = {}
    if prompts is not None:
        settings["mask"] = _mask(parts, queries, prompts)
        settings["key_value"] = None if prompts.key_value is None else prompts.key_value[index]
        settings["temperature"] = 1.0 if prompts.temperature is None else prompts.temperature[index]
    return joined, context, settings


def _places(parts: dict[str, jax.Array], queries: Sequence[str]) -> dict[str, slice]:
    """Return the slice of each part in the sequence of a block: first those in `queries`, then the others in order."""
    order = [*queries, *(name for name in parts if name not in queries)]
    ends = np.cumsum([parts[name].shape[1] for name in order]).tolist()
    return {name: slice(end - parts[name].shape[1], end) for name, end in zip(order, ends, strict=True)}


def _mask(parts: dict[str, jax.Array], queries: Sequence[str], prompts: Prompts) -> np.ndarray | jax.Array | None:
    """Return bool[Q,T] over queries and all tokens in the order of `_places`, or None if no attention is masked."""
    among = prompts.mask if PROMPTS in queries else None
    if among is None and prompts.present is None:
        return None
    size = {name: part.shape[1] for name, part in parts.items()}
    further = 0 if prompts.key_value is None else prompts.key_value.shape[2]
    mask = np.ones((sum(size[name] for name in queries), sum(size.values()) + further), bool)
    columns = _places(parts, queries)[PROMPTS]
    if among is not None:
        mask[columns, columns] = among
    return mask if prompts.present is None else jnp.asarray(mask).at[:, columns].set(mask[:, columns] & prompts.present)


# ---------------------------------------------------------------------------------------------------- published
def _vit_b16(address: str, licence: str, *, half: bool, final_norm: bool) -> Entry:
    shape = ViTShape(width=768, depth=12, heads=12, patch=16, native=224)
    mean, std = ((0.5,) * 3, (0.5,) * 3) if half else (IMAGENET_MEAN, IMAGENET_STD)
    return Entry(shape, mean, std, 224, address.rpartition("/")[2], address, licence, final_norm)


ENTRIES: dict[str, Entry] = {
    "vit_digits": Entry(
        ViTShape(width=128, depth=5, heads=4, patch=8, native=64),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
        64,
        "vit_digits.safetensors",
        "this package; configs/pretrain_digits.py reproduces it",
        "Apache-2.0",
    ),
    # "IN1k" of the ML-VPT paper: pretrained on ImageNet-21k, then on 1k
    "vit_b16_in1k": _vit_b16(
        "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-vitjx/jx_vit_base_p16_224-80ecf9dd.pth",
        "Apache-2.0",
        half=True,
        final_norm=True,
    ),
    "vit_b16_in21k": _vit_b16(
        "https://storage.googleapis.com/vit_models/augreg/"
        "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
        "Apache-2.0",
        half=True,
        final_norm=False,
    ),
    "vit_b16_mae": _vit_b16(
        "https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_base.pth",
        "CC-BY-NC-4.0",
        half=False,
        final_norm=False,
    ),
    "vit_b16_mocov3": _vit_b16(
        "https://dl.fbaipublicfiles.com/moco-v3/vit-b-300ep/linear-vit-b-300ep.pth.tar",
        "CC-BY-NC-4.0",
        half=False,
        final_norm=False,
    ),
}
