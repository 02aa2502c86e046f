"""Learned prompt tokens: how many there are, which group each belongs to, and who may see whom."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.contracts import Prompts
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.models.layers.initializers import torch_linear, uniform

MASKS = ("none", "all_prompts", "cross_group")
PRUNING_MASKS = (r"^prompts/(token|segment)_mask$", False)  # a rule that freezes them


SIDES = {"both": ("co", "dc"), "co": ("co",), "dc": ("dc",)}  # what each choice of model.prompts.sides has


def _axes(sides: int, groups: int, per_group: int) -> tuple[int, int, int]:
    """Return the sizes of the axes along which prompts are numbered, side, expert and group, the last one fastest.

    The order is that of the authors' checkpoints: expert e of group t on side s is prompt s·M·G + e·G + t.
    """
    return sides, per_group, groups


def prompt_places(sides: int, groups: int, per_group: int) -> np.ndarray:
    """Return i32[P,3], P = sides·groups·per_group: the (side, expert, group) of each prompt, ordered by `_axes`."""
    return np.indices(_axes(sides, groups, per_group)).reshape(3, -1).T.astype(np.int32)


def prompt_groups(sides: int, groups: int, per_group: int) -> np.ndarray:
    """Return i32[P]: the side and group of each prompt, numbered side·groups + group, see `prompt_places`."""
    side, _, group = prompt_places(sides, groups, per_group).T
    return side * groups + group


def by_side(tokens: jax.Array, sides: Sequence[str], per_group: int, groups: int) -> dict[str, jax.Array]:
    """Split prompts f32[B,P,D], in the order of `prompt_places`, into those of each side, f32[B,M,G,D]."""
    apart = tokens.reshape(tokens.shape[0], *_axes(len(sides), groups, per_group), tokens.shape[-1])
    return dict(zip(sides, jnp.moveaxis(apart, 1, 0), strict=True))


def groups_by_side(settings: ConfigDict, space: LabelSpace) -> dict[str, np.ndarray]:
    """Return the group i32[K] of every label on each side that `config.model.prompts` has."""
    both = {"co": space.co_group, "dc": space.dc_group}
    return {side: both[side] for side in SIDES[settings.sides]}


def prompt_mask(kind: str, group_of: np.ndarray) -> np.ndarray | None:
    """Return bool[P,P], True where prompt (row) may attend to prompt (column), or None where all may.

    `all_prompts` lets a prompt see only itself (the authors' code); `cross_group` lets the prompts of one group see one
    another and blocks those of other groups (ML-VPT, sec. 3.2); `none` blocks nothing.
    """
    if kind not in MASKS:
        raise ValueError(f"unknown prompt mask {kind!r}; choose from {MASKS}")
    if kind == "none":
        return None
    if kind == "all_prompts":
        return np.eye(len(group_of), dtype=bool)
    return group_of[:, None] == group_of[None, :]


def _prompt_bound(patch: int, width: int) -> float:
    """√(6/(3·patch² + D)), the bound of the uniform draw in the visual-prompt-tuning code."""
    return math.sqrt(6 / (3 * patch**2 + width))


class _PromptTokens(nnx.Module):
    """What all prompt methods share: a projection from a narrower width, if any, and dropout (both as in VPT's code).

    project: width in which prompts are learned, brought to the backbone's by one linear layer; 0 = the backbone's own.
    dropout: rate at which single entries of the projected prompts are dropped, for every image on its own.
    """

    def __init__(self, width: int, *, project: int, dropout: float, rngs: nnx.Rngs):
        self.learned_width = project or width
        kernel, bias = nnx.initializers.variance_scaling(2.0, "fan_out", "normal"), torch_linear(self.learned_width)
        layer = nnx.Linear(project, width, kernel_init=kernel, bias_init=bias, rngs=rngs) if project else None
        self.projection = layer
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    def prepare(self, tokens: jax.Array, batch: int, rngs: nnx.Rngs | None) -> jax.Array:
        """Project f32[L,1,P,d] and, in training, drop out: f32[L, 1 or B, P, D]."""
        if self.projection is not None:
            tokens = self.projection(tokens)
        if self.dropout.deterministic or not self.dropout.rate:
            return tokens
        tokens = jnp.broadcast_to(tokens, (tokens.shape[0], batch, *tokens.shape[2:]))
        return self.dropout(tokens, rngs=rngs)


class DeepPrompts(_PromptTokens):
    """One set of P prompt tokens for every block, f32[L,1,P,D] (VPT-deep, eq. 6; ML-VPT, eq. 8).

    mask: who among them may see whom, bool[P,P], or None. Drawn from U(±√(6/(3·patch² + D))) as in the
    visual-prompt-tuning code.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        patch: int,
        *,
        count: int,
        mask: np.ndarray | None = None,
        project: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        super().__init__(width, project=project, dropout=dropout, rngs=rngs)
        draw = uniform(_prompt_bound(patch, self.learned_width))
        self.deep = nnx.Param(draw(rngs.params(), (depth, 1, count, self.learned_width)))
        self.count, self.key_values, self.mask = count, 0, None if mask is None else Constant(mask)

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        """Return the prompts of all blocks for B = `batch` images, and their mask."""
        return Prompts(self.prepare(self.deep[...], batch, rngs), mask=None if self.mask is None else self.mask.value)


class ShallowPrompts(_PromptTokens):
    """P prompts that enter the first block and travel through all (VPT-shallow, eq. 4–5), gated or not (GateVPT).

    gate_init: None for VPT-shallow. A number θ₀: what enters block i+1 is g·(prompts leaving block i) +
    (1 − g)·(prompts entering it) with g = σ(θᵢ), θ starting at −θ₀, for all blocks but the last (Yoo et al., "Improving
    visual prompt tuning for self-supervised vision transformers", ICML 2023; the start from its code).
    learn_temperature: divide the attention logits of every block by a learned number, kept within 0.01 … 10, starting
    at 1 (the same).
    """

    TEMPERATURES = (0.01, 10.0)

    def __init__(
        self,
        depth: int,
        width: int,
        patch: int,
        *,
        count: int,
        gate_init: float | None = None,
        learn_temperature: bool = False,
        project: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        super().__init__(width, project=project, dropout=dropout, rngs=rngs)
        draw = uniform(_prompt_bound(patch, self.learned_width))
        self.shallow = nnx.Param(draw(rngs.params(), (1, 1, count, self.learned_width)))
        self.gate = None if gate_init is None else nnx.Param(jnp.full(depth - 1, -float(gate_init)))
        self.temperature = nnx.Param(jnp.ones(depth)) if learn_temperature else None
        self.count, self.key_values, self.depth = count, 0, depth

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        """Return the prompts that enter the first block and what happens to them on the way."""
        return Prompts(
            self.prepare(self.shallow[...], batch, rngs),
            carry=jnp.ones(self.depth - 1) if self.gate is None else jax.nn.sigmoid(self.gate[...]),
            temperature=None if self.temperature is None else jnp.clip(self.temperature[...], *self.TEMPERATURES),
        )


class PrunablePrompts(DeepPrompts):
    """The prompts of E2VPT (Han et al., ICCV 2023): deep prompts, further keys and values, and masks that prune.

    key_values: m tokens a block that join keys and values after the projection (its sec. 3.2), heads side by side.
    shared: keys and values are one tensor, as in the code's default.
    segments: of 0, the prompts have no masks. Else every prompt, once projected, is multiplied by its token mask and
    channel c of it by its segment mask c mod `segments`; the masks are those of every block (its sec. 3.3; the paper's
    segments are runs of channels, the code's are interleaved).
    token_mask, segment_mask: f32[P], f32[P,segments], initial values; None = ones.
    absent: a prompt whose token mask is 0 is as if it were not in the sequence. Otherwise it stays as a zero vector
    that is attended to, as in the code.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        patch: int,
        *,
        count: int,
        key_values: int,
        shared: bool = True,
        heads: int,
        segments: int = 0,
        token_mask: np.ndarray | None = None,
        segment_mask: np.ndarray | None = None,
        absent: bool = False,
        project: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        super().__init__(depth, width, patch, count=count, project=project, dropout=dropout, rngs=rngs)
        if segments and width % segments:
            raise UserError(
                f"prompts of width {width} do not divide into {segments} segments; set model.prompts.segments to a "
                "divisor of the backbone's width"
            )
        self.key_values, self.segments, self.absent = key_values, segments, absent
        if key_values:
            # torch's kaiming_uniform on [heads, m, D/heads] takes m·D/heads for the fan-in
            draw = uniform(math.sqrt(6 / (key_values * width // heads)))
            self.key_value = nnx.Param(draw(rngs.params(), (depth, 1 if shared else 2, key_values, width)))
        if segments:
            ones = np.ones((count, segments), np.float32)
            self.token_mask = nnx.Param(jnp.asarray(ones[:, 0] if token_mask is None else token_mask, jnp.float32))
            self.segment_mask = nnx.Param(jnp.asarray(ones if segment_mask is None else segment_mask, jnp.float32))

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        """Return the prompts of all blocks with their masks applied, and the further keys and values."""
        tokens, present = self.prepare(self.deep[...], batch, rngs), None
        if self.segments:
            segments = jnp.tile(self.segment_mask[...], (1, tokens.shape[-1] // self.segments))
            tokens = tokens * self.token_mask[...][:, None] * segments
            present = self.token_mask[...] != 0 if self.absent else None
        key_value = self.key_value[...] if self.key_values else None
        return Prompts(tokens, present=present, key_value=key_value)
