"""Learned prompt tokens: their number, their groups, and the masks between them."""

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
from mlmoe_jax.models import rules
from mlmoe_jax.models.contracts import Prompts
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.models.layers.initializers import torch_linear, uniform
from mlmoe_jax.models.params import Params

MASKS = ("none", "all_prompts", "cross_group")
PRUNING_MASKS = (r"^prompts/(token|segment)_mask$", False)  # the rule that freezes the masks
TEMPERATURES = (0.01, 10.0)
BOUNDS = ((r"^prompts/temperature$", TEMPERATURES),)  # of parameters, as rules: (pattern of paths, (low, high))

SIDES = {"both": ("co", "dc"), "co": ("co",), "dc": ("dc",)}  # the sides per value of model.prompts.sides


def _axes(sides: int, groups: int, per_group: int) -> tuple[int, int, int]:
    """Return the sizes of the axes that number the prompts: side, expert and group, the last one fastest.

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
    """Split prompts f32[B,P,D], in the order of `prompt_places`, by side: f32[B,M,G,D] each."""
    apart = tokens.reshape(tokens.shape[0], *_axes(len(sides), groups, per_group), tokens.shape[-1])
    return dict(zip(sides, jnp.moveaxis(apart, 1, 0), strict=True))


def groups_by_side(settings: ConfigDict, space: LabelSpace) -> dict[str, np.ndarray]:
    """Return the group of each label, i32[K], per side of `config.model.prompts`."""
    both = {"co": space.co_group, "dc": space.dc_group}
    return {side: both[side] for side in SIDES[settings.sides]}


def prompt_mask(kind: str, group_of: np.ndarray) -> np.ndarray | None:
    """Return bool[P,P], True if a prompt (row) may attend to a prompt (column), or None if all may.

    With `all_prompts`, each prompt attends only to itself (the authors' code). With `cross_group`, prompts attend only
    to prompts of the same group (ML-VPT, sec. 4.2). `none` has no mask.
    """
    if kind not in MASKS:
        raise ValueError(f"unknown prompt mask {kind!r}; choose from {MASKS}")
    if kind == "none":
        return None
    if kind == "all_prompts":
        return np.eye(len(group_of), dtype=bool)
    return group_of[:, None] == group_of[None, :]


@jax.custom_jvp
def clamped(value: jax.Array, low: float, high: float) -> jax.Array:
    """Return `value` clamped to low … high, with the derivative 1 everywhere, also at the bounds and beyond them.

    The derivative of a parameter that was clamped in place, as in GateVPT's code: that of `jnp.clip` is 0 beyond the
    bounds, so that a parameter which left them would never return.
    """
    return jnp.clip(value, low, high)


@clamped.defjvp
def _derivative_of_clamped(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return clamped(*primals), tangents[0]


def within_bounds(params: Params) -> Params:
    """Return parameters with those in `BOUNDS` clamped.

    A training step begins with it: GateVPT's code clamps the stored temperatures before each forward pass, and its
    optimizer updates and decays the clamped values.
    """
    found = {path: rules.first_match(BOUNDS, path, None) for path in params}
    return {path: jnp.clip(value, *found[path]) if found[path] else value for path, value in params.items()}


def _prompt_bound(patch: int, width: int) -> float:
    """Return √(6/(3·patch² + D)), the bound of the uniform initial values in the visual-prompt-tuning code."""
    return math.sqrt(6 / (3 * patch**2 + width))


class _PromptTokens(nnx.Module):
    """The base class of all prompt methods: a projection from a narrower width, if any, and dropout (as in VPT's code).

    learned: the number of prompts in all blocks.
    project: the width of the learned prompts, which one linear layer projects to the width of the backbone; 0 = the
    width of the backbone, without projection.
    dropout: the rate at which entries of the projected prompts are dropped, independently per image.
    """

    def __init__(self, width: int, *, learned: int, project: int, dropout: float, rngs: nnx.Rngs):
        self.learned, self.learned_width = learned, project or width
        kernel, bias = nnx.initializers.variance_scaling(2.0, "fan_out", "normal"), torch_linear(self.learned_width)
        layer = nnx.Linear(project, width, kernel_init=kernel, bias_init=bias, rngs=rngs) if project else None
        self.projection = layer
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    @property
    def projection_macs(self) -> int:
        """The multiply-adds of the projection of all prompts, which is computed once per batch."""
        return 0 if self.projection is None else self.learned * self.projection.kernel.size

    def prepare(self, tokens: jax.Array, batch: int, rngs: nnx.Rngs | None) -> jax.Array:
        """Project f32[L,1,P,d] and, in training, apply dropout: f32[L, 1 or B, P, D]."""
        if self.projection is not None:
            tokens = self.projection(tokens)
        if self.dropout.deterministic or not self.dropout.rate:
            return tokens
        tokens = jnp.broadcast_to(tokens, (tokens.shape[0], batch, *tokens.shape[2:]))
        return self.dropout(tokens, rngs=rngs)


class DeepPrompts(_PromptTokens):
    """One set of P prompt tokens per block, f32[L,1,P,D] (VPT, sec. 3.2; ML-VPT, eq. 8).

    mask: bool[P,P], True if a prompt (row) may attend to a prompt (column), or None. Initial values are drawn from
    U(±√(6/(3·patch² + D))) as in the visual-prompt-tuning code.
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
        super().__init__(width, learned=depth * count, project=project, dropout=dropout, rngs=rngs)
        draw = uniform(_prompt_bound(patch, self.learned_width))
        self.deep = nnx.Param(draw(rngs.params(), (depth, 1, count, self.learned_width)))
        self.count, self.key_values, self.mask = count, 0, None if mask is None else Constant(mask)

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        """Return the prompts of all blocks for B = `batch` images, and their mask."""
        return Prompts(self.prepare(self.deep[...], batch, rngs), mask=None if self.mask is None else self.mask.value)


class ShallowPrompts(_PromptTokens):
    """P prompts that are carried from the first block through all blocks (VPT, sec. 3.2), or gated (GateVPT).

    gate_init: None for VPT-shallow. With a number θ₀, the prompts entering block i+1 are g·(prompts leaving block i) +
    (1 − g)·(prompts entering block i) with g = σ(θᵢ), for all blocks but the last; θ is initially −θ₀ (Yoo et al.,
    "Improving visual prompt tuning for self-supervised vision transformers", ICML 2023; initial value from its code).
    learn_temperature: divide the attention logits of each block by a learned number, clamped to 0.01 … 10, initially 1
    (same source; see `clamped` and `within_bounds`).
    """

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
        super().__init__(width, learned=count, project=project, dropout=dropout, rngs=rngs)
        draw = uniform(_prompt_bound(patch, self.learned_width))
        self.shallow = nnx.Param(draw(rngs.params(), (1, 1, count, self.learned_width)))
        self.gate = None if gate_init is None else nnx.Param(jnp.full(depth - 1, -float(gate_init)))
        self.temperature = nnx.Param(jnp.ones(depth)) if learn_temperature else None
        self.count, self.key_values, self.depth = count, 0, depth

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        """Return the prompts that enter the first block, with their gates and temperatures."""
        return Prompts(
            self.prepare(self.shallow[...], batch, rngs),
            carry=jnp.ones(self.depth - 1) if self.gate is None else jax.nn.sigmoid(self.gate[...]),
            temperature=None if self.temperature is None else clamped(self.temperature[...], *TEMPERATURES),
        )


class PrunablePrompts(DeepPrompts):
    """The prompts of E2VPT: deep prompts, additional keys and values, and pruning masks.

    key_values: m tokens per block that are appended to the keys and values after the projection (E2VPT, sec. 3.2),
    with the heads concatenated. shared: keys and values are one tensor, the default of its code.
    segments: 0 = no masks. Otherwise each projected prompt is multiplied by its token mask, and its channel c by its
    segment mask c mod `segments`; all blocks share the masks (E2VPT, sec. 3.3; segments are contiguous channels in
    the paper and interleaved in its code).
    token_mask, segment_mask: f32[P], f32[P,segments], initial values; None = ones.
    absent: prompts whose token mask is 0 are masked out for all tokens. Otherwise they remain as zero vectors that are
    attended to, as in its code.
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
            # the fan-in of torch's kaiming_uniform for [heads, m, D/heads] is m·D/heads
            draw = uniform(math.sqrt(6 / (key_values * width // heads)))
            self.key_value = nnx.Param(draw(rngs.params(), (depth, 1 if shared else 2, key_values, width)))
        if segments:
            ones = np.ones((count, segments), np.float32)
            self.token_mask = nnx.Param(jnp.asarray(ones[:, 0] if token_mask is None else token_mask, jnp.float32))
            self.segment_mask = nnx.Param(jnp.asarray(ones if segment_mask is None else segment_mask, jnp.float32))

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        """Return the prompts of all blocks with their masks applied, and the additional keys and values."""
        tokens, present = self.prepare(self.deep[...], batch, rngs), None
        if self.segments:
            segments = jnp.tile(self.segment_mask[...], (1, tokens.shape[-1] // self.segments))
            tokens = tokens * self.token_mask[...][:, None] * segments
            present = self.token_mask[...] != 0 if self.absent else None
        key_value = self.key_value[...] if self.key_values else None
        return Prompts(tokens, present=present, key_value=key_value)
