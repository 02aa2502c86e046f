"""Vision transformers: one implementation of all ViTs in the papers, with an exact fast path for deep prompts.

Deep prompts are replaced before every block. In every block except the last, a prompt is therefore needed only as a key
and a value. Keys and values of prompts do not depend on the image, so they are computed once per batch, without queries
and without the MLP. In the last block, only the tokens that the head reads are queries. Outputs and gradients are equal
to a computation with all tokens in all blocks. The prompt mask matters only in the last block, where prompts are
queries. Prompts that are carried from block to block (`Prompts.carry`) are queries in all blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.contracts import Adapter, BackboneShape, Layer
from mlmoe_jax.models.layers.deltas import NO_DELTAS, Deltas, block_deltas, call_layer
from mlmoe_jax.models.layers.detr import AttentionPool
from mlmoe_jax.models.layers.dispatch import missing_tokens, record_attention
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.layers.positions import CUBIC, resample_positions, rotary_angles, sine_positions
from mlmoe_jax.models.layers.recompute import LayerNorm
from mlmoe_jax.models.layers.softmax_attention import concatenate_tokens
from mlmoe_jax.models.layers.transformer import Block
from mlmoe_jax.models.outputs import CLS, MEAN, PATCHES, PROMPTS, Features, Prompts

IMAGE, REGISTERS = "image", "registers"  # parts of the sequence that heads do not read


@dataclasses.dataclass(frozen=True)
class ViTShape(BackboneShape):
    """The architecture of a ViT. The `position_…` are arguments of resample_positions, as in the authors' code.

    Attributes:
      native: side of the images, in pixels, whose patch grid is the grid of the position table.
      mlp: a key of layers.transformer.MLPS.
      mask_token: whether published files have the unused parameter `mask_token`. It counts as a parameter.
      registers: number of register tokens (Darcet et al., 2024). They have no position, and heads do not read them. The
        register of TIPSv2 is a second class token.
      rotary_base: `base` of rotary_angles. If set, the attention of each block rotates queries and keys of patches, and
        there is no position table. Other tokens are not rotated. None = a position table.
      class_token: whether there is a class token. If not, the feature `cls` is the output of an attention pool over the
        patches after the final norm.
      published: a side of images that is accepted although it is no multiple of `patch`. As in the authors' code, the
        pixels after the last whole patch are ignored.
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
    position_kernel: str = CUBIC
    registers: int = 0
    rotary_base: float | None = None
    key_bias: bool = True
    patch_bias: bool = True
    pre_norm: bool = False
    class_token: bool = True
    published: int = 0

    takes_adapters = True

    @property
    def hidden(self) -> int:
        """The hidden width of an MLP: width · mlp_ratio; SwiGLU: 2/3 of it, rounded up to a multiple of 8 (DINOv2)."""
        hidden = int(self.width * self.mlp_ratio)
        return (int(hidden * 2 / 3) + 7) // 8 * 8 if self.mlp == "swiglu" else hidden

    @property
    def layers(self) -> dict[str, Layer]:
        width = self.width
        hidden = self.hidden
        square = Layer(width, width)
        outside = Layer(width, width, in_block=False)
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

    def fits(self, side: int) -> bool:
        return side == self.published or super().fits(side)

    def build(self, *, batch_norm: str = "frozen", **options: Any) -> ViT:
        return ViT(self, **options)

    def build_block(self, *, dtype: Dtype, rngs: nnx.Rngs) -> Block:
        """Build one block with random weights."""
        return Block(
            self.width,
            self.heads,
            self.hidden,
            mlp=self.mlp,
            eps=self.eps,
            layer_scale=self.layer_scale,
            key_bias=self.key_bias,
            dtype=dtype,
            rngs=rngs,
        )

    def published_macs(self, side: int, prompts: Adapter) -> tuple[int, int, int]:
        """Return (multiply-adds of linear layers and norms, multiply-adds of attention, number of patches N).

        A LayerNorm of T tokens of width D counts as 4·T·D. As in the papers, all tokens are counted in all blocks,
        although this code computes less. An attention pool is counted even if the head does not read `cls`.
        """
        patches = (side // self.patch) ** 2
        width = self.width
        tokens = self.tokens(side, prompts)
        mlp = (3 if self.mlp == "swiglu" else 2) * width * self.hidden
        linear = patches * 3 * self.patch**2 * width + self.depth * tokens * (4 * width**2 + mlp)
        products = self.depth * 2 * tokens * (tokens + prompts.key_values) * width
        if not self.class_token:  # the attention pool
            linear += (2 + 2 * patches) * width**2 + mlp
            products += 2 * patches * width
        return linear + self.norm_macs(side, prompts), products, patches

    def norm_macs(self, side: int, prompts: Adapter) -> int:
        pool_tokens = not self.class_token
        return 4 * self.width * ((2 * self.depth + 1 + self.pre_norm) * self.tokens(side, prompts) + pool_tokens)

    def tokens(self, side: int, prompts: Adapter) -> int:
        """Return the number of tokens in a block: class token, registers, prompts and patches."""
        return self.leading + prompts.count + (side // self.patch) ** 2


class ViT(nnx.Module):
    """A ViT encoder; its parameters are named as in the published PyTorch files (`blocks/3/attn/qkv/kernel`).

    Parameters, positions, LayerNorm, softmax and the residual stream are always float32.

    Args:
      dtype: type of the matmuls and of their inputs and outputs inside a block; None = float32.
      remat: recompute each block in the backward pass instead of storing its activations. This needs the activation
        memory of one block, and about a third more time.
    """

    def __init__(self, shape: ViTShape, *, dtype: Dtype = None, remat: bool = False, rngs: nnx.Rngs):
        self.shape = shape
        self.remat = remat
        width = shape.width
        normal = nnx.initializers.truncated_normal(0.02)
        self.patch_embed = nnx.Linear(3 * shape.patch**2, width, use_bias=shape.patch_bias, dtype=dtype, rngs=rngs)
        if shape.class_token:
            self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        if shape.rotary_base is None:
            self.pos_embed = nnx.Param(_initial_positions(shape))
        if shape.mask_token:
            self.mask_token = nnx.Param(jnp.zeros((1, width)))
        if shape.registers:
            self.register_tokens = nnx.Param(normal(rngs.params(), (1, shape.registers, width)))
        if shape.pre_norm:
            self.norm_pre = LayerNorm(width, epsilon=shape.eps, rngs=rngs)
        self.blocks = nnx.List(shape.build_block(dtype=dtype, rngs=rngs) for _ in range(shape.depth))
        self.norm = LayerNorm(width, epsilon=shape.eps, rngs=rngs)
        options = {"mlp": shape.mlp, "eps": shape.eps, "dtype": dtype, "rngs": rngs}
        self.pool = None if shape.class_token else AttentionPool(width, shape.heads, shape.hidden, **options)

    def embed(self, image: jax.Array, deltas: Deltas = NO_DELTAS) -> tuple[jax.Array, tuple[int, int]]:
        """Return the input tokens f32[B,C+R+N,D] of the first block, and the patch grid (rows, columns).

        The tokens of images f32[B,H,W,3] are C = 1 or 0 class tokens, R registers and N patches, in this order, without
        prompts. Raises ValueError if the sides of the image do not fit the patch size.
        """
        shape = self.shape
        pixels, grid = _cut_patches(image, shape)
        tokens = call_layer(self.patch_embed, pixels, "patch_embed", deltas)
        leading = [self.cls_token[...]] if shape.class_token else []
        if shape.rotary_base is None:
            class_position, table = jnp.split(self.pos_embed[...], [int(shape.class_token)], axis=1)
            tokens = tokens + resample_positions(
                table,
                grid,
                offset=shape.position_offset,
                antialias=shape.position_antialias,
                kernel=shape.position_kernel,
            )
            leading = [token + class_position for token in leading]
        if shape.registers:
            leading.append(self.register_tokens[...])
        tokens = concatenate_tokens([*leading, tokens])
        return call_layer(self.norm_pre, tokens, "norm_pre", deltas) if shape.pre_norm else tokens, grid

    def rotary(self, grid: tuple[int, int]) -> jax.Array | None:
        """Return the rotary angles f32[C+R+N,d/2] of the tokens of `embed`, for heads of width d.

        The angles of class token and registers are 0. Without `rotary_base`, the result is None.
        """
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
        """Encode images f32[B,H,W,3]; see contracts.Backbone for arguments and result.

        The keys of `deltas` are layer paths, see `BackboneShape.layer_paths`. An attention pool takes no deltas. Raises
        ValueError if the sides of the image do not fit the patch size, or if `read` contains `prompts` and `prompts` is
        None.
        """
        _check_read(read, prompts)
        tokens, grid = self.embed(image, deltas)
        if prompts is None:
            prompts = Prompts.none(self.shape.depth, self.shape.width)
        spare = self._missing_tokens(tokens.shape[1], prompts)
        if spare:
            tokens = jnp.pad(tokens, ((0, 0), (0, spare), (0, 0)))
        inputs = _BlockInputs(prompts, self.rotary(grid), deltas, spare)
        entered = self._run_first_blocks(tokens, inputs)
        parts = self._run_last_block(entered, read, inputs)
        normed = {name: call_layer(self.norm, part, "norm", deltas) for name, part in parts.items()}
        values = {name: part for name, part in (normed if norm else parts).items() if name in read}
        cls = self.pool(normed[PATCHES]) if self.pool is not None and CLS in read else None
        if CLS in values:
            cls = values[CLS][:, 0]
        features = Features(cls, values.get(PROMPTS), values.get(PATCHES), grid, mean=values.get(MEAN))
        return self._explain(features, entered, normed, read, inputs) if return_attention else features

    def _missing_tokens(self, count: int, prompts: Prompts) -> int:
        """Return the number of tokens that `dispatch.missing_tokens` asks for in addition to `count` image tokens."""
        carries = prompts.carry is not None
        if prompts.present is not None or (carries and prompts.mask is not None):
            return 0
        width = self.shape.width // self.shape.heads
        return missing_tokens(count + carries * prompts.count, width, self.patch_embed.dtype or jnp.float32)

    def _run_first_blocks(self, tokens: jax.Array, inputs: _BlockInputs) -> dict[str, jax.Array]:
        """Apply all blocks except the last, and return the input of the last block.

        Its tokens are divided into the parts `prompts`, `cls`, `registers` and `patches`: {part: f32[1 or B, T, D]},
        where T is the number of tokens of the part.
        """
        prompts = inputs.prompts
        parts = {IMAGE: tokens, PROMPTS: prompts.tokens[0]}
        queries = (IMAGE,) if prompts.carry is None else (PROMPTS, IMAGE)
        for block in range(self.shape.depth - 1):
            outputs = self._run_block(block, parts, queries, inputs)
            entering = prompts.entering(block + 1, parts[PROMPTS], outputs.get(PROMPTS, parts[PROMPTS]))
            parts = {PROMPTS: entering, IMAGE: outputs[IMAGE]}
        ends = int(self.shape.class_token), self.shape.leading, tokens.shape[1] - inputs.spare
        cls, registers, patches, _ = jnp.split(parts[IMAGE], ends, axis=1)
        return {PROMPTS: parts[PROMPTS], CLS: cls, REGISTERS: registers, PATCHES: patches}

    def _run_last_block(
        self, parts: dict[str, jax.Array], read: Collection[str], inputs: _BlockInputs
    ) -> dict[str, jax.Array]:
        """Apply the last block. Return the parts that the features in `read` need, and `mean` f32[B,D] if asked for."""
        needed = set(read)
        if MEAN in read:
            needed |= {PROMPTS, PATCHES}
        if self.pool is not None and CLS in read:
            needed.add(PATCHES)
        queries = [name for name, part in parts.items() if name in needed and part.shape[1]]
        parts = self._run_block(self.shape.depth - 1, parts, queries, inputs)
        return parts | {MEAN: _mean(parts, inputs.prompts)} if MEAN in read else parts

    def _run_block(
        self, index: int, parts: dict[str, jax.Array], queries: Sequence[str], inputs: _BlockInputs
    ) -> dict[str, jax.Array]:
        """Return the output tokens of a block for the parts in `queries`; other parts provide only keys and values."""
        sequence = _Sequence(parts, queries)
        settings = inputs.settings(index, sequence)

        def run(tokens: jax.Array, context: list[jax.Array]) -> jax.Array:
            return self.blocks[index](tokens, context, **settings)

        outputs = (jax.checkpoint(run) if self.remat else run)(sequence.tokens(), sequence.context())
        ends = np.cumsum([parts[name].shape[1] for name in queries])[:-1]
        return dict(zip(queries, jnp.split(outputs, ends, axis=1), strict=True))

    def _explain(
        self,
        features: Features,
        entered: dict[str, jax.Array],
        normed: dict[str, jax.Array],
        read: Collection[str],
        inputs: _BlockInputs,
    ) -> Features:
        """Return features with `attention` and `cells`, from the parts before the last block and after the norm."""
        attention = self._attend_to_patches(entered, read, inputs)
        cells = {name: normed[PATCHES] for name in (MEAN, PATCHES) if name in read}
        if CLS in read and self.pool is None:
            cells[CLS] = self._class_tokens(entered, inputs)
        elif CLS in read:
            patches = normed[PATCHES]
            with record_attention() as weights:
                self.pool(patches)
            attention[CLS] = weights[0].mean(axis=1)
            cells[CLS] = self.pool(patches.reshape(-1, 1, patches.shape[2])).reshape(patches.shape)
        return dataclasses.replace(features, attention=attention, cells=cells)

    def _class_tokens(self, entered: dict[str, jax.Array], inputs: _BlockInputs) -> jax.Array:
        """Return f32[B,N,D]: for each patch, the class token if it attends to this patch alone in the last block."""
        last, patches = self.shape.depth - 1, entered[PATCHES]
        count = patches.shape[1]
        tokens = jnp.broadcast_to(entered[CLS], patches.shape)
        mask = np.eye(count, 2 * count, k=count, dtype=bool)
        outputs = self.blocks[last](tokens, [patches], mask=mask, deltas=block_deltas(inputs.deltas, last))
        return call_layer(self.norm, outputs, "norm", inputs.deltas)

    def _attend_to_patches(
        self, parts: dict[str, jax.Array], read: Collection[str], inputs: _BlockInputs
    ) -> dict[str, jax.Array]:
        """Return the attention f32[B,Q,N] of `cls` and `prompts` in the last block, averaged over heads."""
        names = [name for name in (PROMPTS, CLS) if name in read and parts[name].shape[1]]
        if not names:
            return {}
        last = self.shape.depth - 1
        sequence = _Sequence(parts, names)
        settings = inputs.settings(last, sequence)
        with record_attention() as recorded:
            self.blocks[last](sequence.tokens(), sequence.context(), **settings)
        weights, slices = recorded[0].mean(axis=1), sequence.slices()
        return {name: weights[:, slices[name], slices[PATCHES]] for name in names}


def _initial_positions(shape: ViTShape) -> jax.Array:
    """Return a position table f32[1,C+N,D]: zeros for C = 0 or 1 class tokens, then sine positions.

    With it, training from scratch is several times faster than with random values.
    """
    table = sine_positions(shape.native // shape.patch, shape.width)
    return jnp.pad(table, ((0, 0), (int(shape.class_token), 0), (0, 0)))


def _check_read(read: Collection[str], prompts: Prompts | None) -> None:
    """Raise ValueError if `read` is empty, has a feature that a ViT lacks, or has `prompts` while `prompts` is None."""
    if not read or set(read) - {CLS, PROMPTS, PATCHES, MEAN} or (PROMPTS in read and prompts is None):
        raise ValueError(f"cannot read {sorted(read)} {'without prompts' if prompts is None else ''}")


def _cut_patches(image: jax.Array, shape: ViTShape) -> tuple[jax.Array, tuple[int, int]]:
    """Return the patches f32[B,N,3·patch²] of images f32[B,H,W,3], row-major over the grid, and the grid."""
    batch, height, width, _ = image.shape
    patch = shape.patch
    if not (shape.fits(height) and shape.fits(width)):
        raise ValueError(f"images of {height}×{width} pixels are not a multiple of the patch size {patch}")
    rows = height // patch
    columns = width // patch
    if height % patch or width % patch:
        image = image[:, : rows * patch, : columns * patch]
    pieces = image.reshape(batch, rows, patch, columns, patch, 3).swapaxes(2, 3)
    return pieces.reshape(batch, rows * columns, -1), (rows, columns)


def _mean(parts: dict[str, jax.Array], prompts: Prompts) -> jax.Array:
    """Return the mean f32[B,D] over the patches and the present prompts (see `Prompts.present`)."""
    patches = parts[PATCHES]
    if not prompts.count:
        return patches.mean(axis=1)
    tokens = parts[PROMPTS]
    present = jnp.ones(prompts.count, bool) if prompts.present is None else prompts.present
    total = tokens.sum(axis=1, where=present[:, None]) + patches.sum(axis=1)
    return total / (present.sum() + patches.shape[1])


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """The input tokens of a block, by part, f32[B or 1, T, D].

    The parts in `queries` come first in the sequence; all others provide only keys and values.
    """

    parts: dict[str, jax.Array]
    queries: Sequence[str]

    def tokens(self) -> jax.Array:
        """Return the tokens of the parts in `queries`."""
        return concatenate_tokens([self.parts[name] for name in self.queries])

    def context(self) -> list[jax.Array]:
        """Return the non-empty parts that are not in `queries`."""
        return [part for name, part in self.parts.items() if name not in self.queries and part.shape[1]]

    def slices(self) -> dict[str, slice]:
        """Return the slice of each part on the token axis of the sequence, by name."""
        order = [*self.queries, *(name for name in self.parts if name not in self.queries)]
        ends = np.cumsum([self.parts[name].shape[1] for name in order]).tolist()
        return {name: slice(end - self.parts[name].shape[1], end) for name, end in zip(order, ends, strict=True)}


@dataclasses.dataclass(frozen=True)
class _BlockInputs:
    """The inputs of the blocks in addition to the tokens."""

    prompts: Prompts  # the prompts, possibly P = 0
    rotary: jax.Array | None  # the rotary angles of the image tokens, see ViT.rotary; None = no rotation
    deltas: Deltas  # layer path -> delta
    spare: int  # the number of zeros at the end of the image tokens, which are not keys; see dispatch.missing_tokens

    def settings(self, index: int, sequence: _Sequence) -> dict[str, Any]:
        """Return the keyword arguments of block `index`."""
        prompts = self.prompts
        return {
            "deltas": block_deltas(self.deltas, index),
            "mask": self._mask(sequence),
            "key_value": None if prompts.key_value is None else prompts.key_value[index],
            "temperature": None if prompts.temperature is None else prompts.temperature[index],
            "rotary": None if self.rotary is None else self._angles(sequence),
            "spare": self.spare if IMAGE in sequence.parts else 0,
        }

    def _num_keys(self, sequence: _Sequence) -> int:
        """Return the number of keys T: all tokens of the sequence plus the m additional keys of `prompts.key_value`."""
        extra = 0 if self.prompts.key_value is None else self.prompts.key_value.shape[2]
        return sum(part.shape[1] for part in sequence.parts.values()) + extra

    def _mask(self, sequence: _Sequence) -> np.ndarray | jax.Array | None:
        """Return the mask bool[Q,T], True if a query (row) may attend to a key (column); None = all True."""
        prompts = self.prompts
        mask_among_prompts = prompts.mask if PROMPTS in sequence.queries else None
        if mask_among_prompts is None and prompts.present is None:
            return None
        num_queries = sum(sequence.parts[name].shape[1] for name in sequence.queries)
        mask = np.ones((num_queries, self._num_keys(sequence)), bool)
        columns = sequence.slices()[PROMPTS]
        if mask_among_prompts is not None:
            mask[columns, columns] = mask_among_prompts
        if prompts.present is None:
            return mask
        return jnp.asarray(mask).at[:, columns].set(mask[:, columns] & prompts.present)

    def _angles(self, sequence: _Sequence) -> jax.Array:
        """Return the rotary angles f32[T,d/2] of all keys. Angles of tokens that are not image tokens are 0."""
        angles = jnp.zeros((self._num_keys(sequence), self.rotary.shape[1]))
        name = IMAGE if IMAGE in sequence.parts else PATCHES
        place = sequence.slices()[name]
        rotary = self.rotary[place.start - place.stop :]
        return angles.at[place.start : place.start + len(rotary)].set(rotary)
