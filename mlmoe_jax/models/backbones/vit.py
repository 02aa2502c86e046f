"""Vision transformers: one implementation of all ViTs in the papers, with an exact fast path for deep prompts.

Deep prompts are replaced before every block. In every block but the last, a prompt therefore provides only a key and a
value. Keys and values of prompts do not depend on the image, so they are computed once per batch, without queries and
without the MLP. In the last block, only the tokens that the head reads are queries. Outputs and gradients are equal to
a computation with all tokens in all blocks. The prompt mask matters only in the last block, where prompts are queries.
Prompts that are carried from block to block (`Prompts.carry`) are queries in all blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.contracts import BackboneShape, Layer
from mlmoe_jax.models.layers.deltas import NO_DELTAS, block_deltas, call_layer
from mlmoe_jax.models.layers.detr import AttentionPool
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.layers.positions import resample_positions, rotary_angles, sine_positions
from mlmoe_jax.models.layers.recompute import LayerNorm
from mlmoe_jax.models.layers.transformer import Block, hidden_width
from mlmoe_jax.models.outputs import CLS, MEAN, PATCHES, PROMPTS, Deltas, Features, Prompts

IMAGE, REGISTERS = "image", "registers"  # parts of the sequence that heads do not read


@dataclasses.dataclass(frozen=True)
class ViTShape(BackboneShape):
    """The architecture of a ViT.

    Attributes:
      native: image size of the position table, in pixels.
      mlp: a key of layers.transformer.MLPS.
      mask_token: whether published files have an unused tensor, which counts as a parameter.
      position_offset: how the authors' code resamples its table to another grid, see resample_positions.
      position_antialias: see resample_positions.
      registers: number of register tokens (Darcet et al., 2024), which have no position and are not read by heads.
      rotary_base: if set, patches have rotary positions in each attention (see rotary_angles) instead of a table; other
        tokens have no position.
      key_bias: whether keys have a bias.
      patch_bias: whether the patch embedding has a bias.
      pre_norm: whether a LayerNorm follows the embedding.
      class_token: whether there is a class token. Otherwise `cls` is the output of an attention pool over the patches
        after the final norm.
    """

    width: int
    depth: int
    heads: int
    patch: int
    native: int
    mlp_ratio: float = 4.0
    mlp: str = "gelu"
    eps: float = 1e-6
    layer_scale: float | None = None
    mask_token: bool = False
    position_offset: float = 0.0
    position_antialias: bool = False
    registers: int = 0
    rotary_base: float | None = None
    key_bias: bool = True
    patch_bias: bool = True
    pre_norm: bool = False
    class_token: bool = True

    takes_adapters = True

    @property
    def hidden(self) -> int:
        return hidden_width(self.width, self.mlp_ratio, self.mlp)

    @property
    def layers(self) -> dict[str, Layer]:
        width, hidden = self.width, self.hidden
        square, outside = Layer(width, width), Layer(width, width, in_block=False)
        return {
            "patch_embed": Layer(3 * self.patch**2, width, self.patch_bias, in_block=False),
            **({"norm_pre": outside} if self.pre_norm else {}),
            "norm1": square,
            **{"query": square, "key": square._replace(bias=self.key_bias), "value": square, "output": square},
            "norm2": square,
            "fc1": Layer(width, hidden * (2 if self.mlp == "swiglu" else 1)),
            "fc2": Layer(hidden, width),
            "norm": outside,
        }

    @property
    def leading(self) -> int:
        return self.class_token + self.registers

    def build(self, *, dtype: Dtype = None, remat: bool = False, batch_norm: str = "frozen", rngs: nnx.Rngs) -> ViT:
        return ViT(self, dtype=dtype, remat=remat, rngs=rngs)

    def published_macs(self, side: int, prompts: nnx.Module | None) -> tuple[int, int, int]:
        """Return the count of linear layers with 4·tokens·D per LayerNorm, the count of attention matmuls, and N.

        All tokens are counted in all blocks, as in the papers; the fast path computes less. An attention pool is
        counted even if the head does not read `cls`.
        """
        patches, width, tokens = (side // self.patch) ** 2, self.width, self.tokens(side, prompts)
        extra = 0 if prompts is None else prompts.key_values
        mlp = (3 if self.mlp == "swiglu" else 2) * width * self.hidden
        linear = patches * 3 * self.patch**2 * width + self.depth * tokens * (4 * width**2 + mlp)
        linear += 0 if prompts is None else prompts.projection_macs
        products = self.depth * 2 * tokens * (tokens + extra) * width
        if not self.class_token:
            linear, products = linear + (2 + 2 * patches) * width**2 + mlp, products + 2 * patches * width
        return linear + self.norm_macs(side, prompts), products, patches

    def norm_macs(self, side: int, prompts: nnx.Module | None) -> int:
        pool_tokens = not self.class_token
        return 4 * self.width * ((2 * self.depth + 1 + self.pre_norm) * self.tokens(side, prompts) + pool_tokens)

    def tokens(self, side: int, prompts: nnx.Module | None) -> int:
        """Return the number of tokens in a block: class token, registers, prompts and patches."""
        return self.leading + (0 if prompts is None else prompts.count) + (side // self.patch) ** 2


class ViT(nnx.Module):
    """A ViT encoder; its parameters are named as in the published PyTorch files (`blocks/3/attn/qkv/kernel`).

    Parameters, positions, LayerNorm, softmax and the residual stream are always float32.

    Args:
      shape: the architecture.
      dtype: type of the matmuls and of their inputs and outputs inside a block; None = float32.
      remat: recompute each block in the backward pass instead of storing its activations. This needs the activation
        memory of one block, and about a third more time.
      rngs: for the weights.
    """

    def __init__(self, shape: ViTShape, *, dtype: Dtype = None, remat: bool = False, rngs: nnx.Rngs):
        self.shape, self.remat = shape, remat
        normal = nnx.initializers.truncated_normal(0.02)
        self.patch_embed = nnx.Linear(
            3 * shape.patch**2, shape.width, use_bias=shape.patch_bias, dtype=dtype, rngs=rngs
        )
        if shape.class_token:
            self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, shape.width)))
        if shape.rotary_base is None:
            # With this initial table, training from scratch is several times faster than with random values.
            table = sine_positions(shape.native // shape.patch, shape.width)
            self.pos_embed = nnx.Param(jnp.pad(table, ((0, 0), (int(shape.class_token), 0), (0, 0))))
        if shape.mask_token:
            self.mask_token = nnx.Param(jnp.zeros((1, shape.width)))
        if shape.registers:
            self.register_tokens = nnx.Param(normal(rngs.params(), (1, shape.registers, shape.width)))
        if shape.pre_norm:
            self.norm_pre = LayerNorm(shape.width, epsilon=shape.eps, rngs=rngs)
        shared = {"mlp": shape.mlp, "eps": shape.eps, "dtype": dtype, "rngs": rngs}
        sizes = (shape.width, shape.heads, shape.hidden)
        self.blocks = nnx.List(
            Block(*sizes, layer_scale=shape.layer_scale, key_bias=shape.key_bias, **shared) for _ in range(shape.depth)
        )
        self.norm = LayerNorm(shape.width, epsilon=shape.eps, rngs=rngs)
        self.pool = None if shape.class_token else AttentionPool(*sizes, **shared)

    def embed(self, image: jax.Array, deltas: Deltas = NO_DELTAS) -> tuple[jax.Array, tuple[int, int]]:
        """Split f32[B,H,W,3] into patches; return the tokens and the patch grid.

        Tokens are f32[B,C+R+N,D]: C = 1 or 0 class tokens, R registers, N patches. `deltas` are described in
        `__call__`. Raises ValueError if the sides of the image are not multiples of the patch size.
        """
        shape, patch = self.shape, self.shape.patch
        batch, height, width, _ = image.shape
        if height % patch or width % patch:
            raise ValueError(f"images of {height}×{width} pixels are not a multiple of the patch size {patch}")
        grid = height // patch, width // patch
        pieces = image.reshape(batch, grid[0], patch, grid[1], patch, 3).swapaxes(2, 3)
        tokens = call_layer(self.patch_embed, pieces.reshape(batch, grid[0] * grid[1], -1), "patch_embed", deltas)
        leading = [self.cls_token[...]] if shape.class_token else []
        if shape.rotary_base is None:
            class_position, table = jnp.split(self.pos_embed[...], [int(shape.class_token)], axis=1)
            tokens = tokens + resample_positions(
                table, grid, offset=shape.position_offset, antialias=shape.position_antialias
            )
            leading = [token + class_position for token in leading]
        if shape.registers:
            leading.append(self.register_tokens[...])
        leading = [jnp.broadcast_to(part, (batch, *part.shape[1:])) for part in leading]
        tokens = jnp.concatenate([*leading, tokens], axis=1)
        return call_layer(self.norm_pre, tokens, "norm_pre", deltas) if shape.pre_norm else tokens, grid

    def rotary(self, grid: tuple[int, int]) -> jax.Array | None:
        """Return the angles f32[C+R+N,d/2] by which each attention rotates the tokens of `embed`, or None."""
        shape = self.shape
        if shape.rotary_base is None:
            return None
        angles = rotary_angles(grid, shape.width // shape.heads, shape.rotary_base)
        return jnp.pad(angles, ((shape.leading, 0), (0, 0)))

    def __call__(
        self,
        image: jax.Array,
        prompts: Prompts | None = None,
        *,
        read: Collection[str] = (CLS,),
        norm: bool = True,
        return_attention: bool = False,
        deltas: Deltas = NO_DELTAS,
    ) -> Features:
        """Encode f32[B,H,W,3], see contracts.Backbone.

        `deltas` are by layer path, see `BackboneShape.layer_paths`; an attention pool takes none. Raises ValueError if
        the sides of the image are not multiples of the patch size, or if prompts are read without prompts.
        """
        unknown = set(read) - {CLS, PROMPTS, PATCHES, MEAN}
        if unknown or not read or (PROMPTS in read and prompts is None):
            raise ValueError(f"cannot read {sorted(read)} {'without prompts' if prompts is None else ''}")
        tokens, grid = self.embed(image, deltas)
        rotary = self.rotary(grid)
        options = {"prompts": prompts, "rotary": rotary, "deltas": deltas}
        run = partial(self._block, **options)
        parts = {IMAGE: tokens} | ({} if prompts is None else {PROMPTS: prompts.tokens[0]})
        for index in range(self.shape.depth - 1):
            if prompts is None or prompts.carry is None:
                parts |= run(index, parts, (IMAGE,))
                parts |= {} if prompts is None else {PROMPTS: prompts.tokens[index + 1]}
            else:
                outputs = run(index, parts, (PROMPTS, IMAGE))
                gate = prompts.carry[index]
                parts = outputs | {PROMPTS: gate * outputs[PROMPTS] + (1 - gate) * parts[PROMPTS]}
        tokens = parts.pop(IMAGE)
        ends = int(self.shape.class_token), self.shape.leading
        parts |= dict(zip((CLS, REGISTERS, PATCHES), jnp.split(tokens, ends, axis=1), strict=True))
        # An attention pool reads the patches instead of a class token.
        needed = set(read) if self.pool is None else {PATCHES if name == CLS else name for name in read}
        requested = [name for name in parts if name in needed]
        queries = [name for name in parts if name in requested or (MEAN in read and name in (PROMPTS, PATCHES))]
        attention = self._attention(parts, requested, **options) if return_attention else {}
        parts = run(self.shape.depth - 1, parts, queries)
        parts |= {MEAN: _mean(parts, prompts)} if MEAN in read else {}
        normed = {name: call_layer(self.norm, part, "norm", deltas) for name, part in parts.items()}
        parts = normed if norm else parts
        if self.pool is not None and CLS in read:
            parts = parts | {CLS: self.pool(normed[PATCHES])[:, None]}
            attention |= {CLS: self.pool.weights(normed[PATCHES])} if return_attention else {}
        values = {name: parts[name] for name in read}
        cls = None if CLS not in values else values[CLS][:, 0]
        return Features(cls, values.get(PROMPTS), values.get(PATCHES), grid, attention, values.get(MEAN))

    def _block(
        self, index: int, parts: dict[str, jax.Array], queries: Sequence[str], **options: Any
    ) -> dict[str, jax.Array]:
        """Apply a block to the parts in `queries`. All other parts are context. Each part is f32[B or 1, T, D]."""
        joined, context, settings = _block_arguments(index, parts, queries, **options)

        def run(tokens: jax.Array, context: list[jax.Array]) -> jax.Array:
            return self.blocks[index](tokens, context, **settings)

        outputs = (jax.checkpoint(run) if self.remat else run)(joined, context)
        ends = np.cumsum([parts[name].shape[1] for name in queries])[:-1]
        return dict(zip(queries, jnp.split(outputs, ends, axis=1), strict=True))

    def _attention(self, parts: dict[str, jax.Array], queries: Sequence[str], **options: Any) -> dict[str, jax.Array]:
        """Return the attention of `cls` and `prompts`, if in `queries`, over patches in the last block: f32[B,Q,N]."""
        names = [name for name in queries if name != PATCHES]
        if not names:
            return {}
        last = self.shape.depth - 1
        tokens, context, settings = _block_arguments(last, parts, names, **options)
        weights = self.blocks[last].weights(tokens, context, **settings).mean(axis=1)
        places = _places(parts, names)
        return {name: weights[:, places[name], places[PATCHES]] for name in names}


def _mean(parts: dict[str, jax.Array], prompts: Prompts | None) -> jax.Array:
    """Return the mean f32[B,D] over the present prompts, if any, and the patches."""
    patches = parts[PATCHES]
    if prompts is None:
        return patches.mean(axis=1)
    tokens = parts[PROMPTS]
    present = jnp.ones(tokens.shape[1], bool) if prompts.present is None else prompts.present
    total = tokens.sum(axis=1, where=present[:, None]) + patches.sum(axis=1)
    return total / (present.sum() + patches.shape[1])


def _block_arguments(
    index: int,
    parts: dict[str, jax.Array],
    queries: Sequence[str],
    *,
    prompts: Prompts | None,
    rotary: jax.Array | None,
    deltas: Deltas,
) -> tuple[jax.Array, list[jax.Array], dict[str, Any]]:
    """Return the arguments of block `index`: tokens from the parts in `queries`, context, and settings."""
    context = [part for name, part in parts.items() if name not in queries and part.shape[1]]
    (batch,) = jnp.broadcast_shapes(*(parts[name].shape[:1] for name in queries))
    joined = jnp.concatenate(
        [jnp.broadcast_to(parts[name], (batch, *parts[name].shape[1:])) for name in queries], axis=1
    )
    settings: dict[str, Any] = {"deltas": block_deltas(deltas, index)} if deltas else {}
    if prompts is not None:
        settings["mask"] = _mask(parts, queries, prompts)
        settings["key_value"] = None if prompts.key_value is None else prompts.key_value[index]
        settings["temperature"] = None if prompts.temperature is None else prompts.temperature[index]
    if rotary is not None:
        settings["rotary"] = _angles(parts, queries, prompts, rotary)
    return joined, context, settings


def _angles(
    parts: dict[str, jax.Array], queries: Sequence[str], prompts: Prompts | None, rotary: jax.Array
) -> jax.Array:
    """Return the angles f32[T,d/2] of all tokens in the order of `_places`. Only patches are rotated.

    `rotary` has the angles of the tokens of the image, see ViT.rotary.
    """
    places = _places(parts, queries)
    angles = jnp.zeros((_length(parts, prompts), rotary.shape[1]))
    name = IMAGE if IMAGE in parts else PATCHES
    return angles.at[places[name]].set(rotary[-parts[name].shape[1] :])


def _length(parts: dict[str, jax.Array], prompts: Prompts | None) -> int:
    """Return T, the number of keys: all tokens, and the additional keys of the prompts."""
    extra = 0 if prompts is None or prompts.key_value is None else prompts.key_value.shape[2]
    return sum(part.shape[1] for part in parts.values()) + extra


def _places(parts: dict[str, jax.Array], queries: Sequence[str]) -> dict[str, slice]:
    """Return the slice of each part in the sequence of a block: first the parts in `queries`, then all other parts."""
    order = [*queries, *(name for name in parts if name not in queries)]
    ends = np.cumsum([parts[name].shape[1] for name in order]).tolist()
    return {name: slice(end - parts[name].shape[1], end) for name, end in zip(order, ends, strict=True)}


def _mask(parts: dict[str, jax.Array], queries: Sequence[str], prompts: Prompts) -> np.ndarray | jax.Array | None:
    """Return bool[Q,T] over queries and all tokens in the order of `_places`, or None if no attention is masked."""
    among = prompts.mask if PROMPTS in queries else None
    if among is None and prompts.present is None:
        return None
    mask = np.ones((sum(parts[name].shape[1] for name in queries), _length(parts, prompts)), bool)
    columns = _places(parts, queries)[PROMPTS]
    if among is not None:
        mask[columns, columns] = among
    return mask if prompts.present is None else jnp.asarray(mask).at[:, columns].set(mask[:, columns] & prompts.present)
