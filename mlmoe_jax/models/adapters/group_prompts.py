"""Group prompts (ML-VPT): deep prompts of label groups, their order, and the masks between them.

Shape letters: P prompts, D width, S sides, G groups per side, M prompts (= experts) per group, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models.adapters.prompts import DeepPrompts

SIDES = {"both": ("co", "dc"), "co": ("co",), "dc": ("dc",)}  # the sides per value of model.prompts.sides
_MOST_PROMPTS = 2000  # the attention mask and the attention weights have its square


class GroupPrompts(DeepPrompts):
    """Deep prompts, M per label group and side (ML-VPT, sec. 4.2). A side is a grouping of labels, `co` or `dc`."""

    uses_groups = True

    @classmethod
    def prompts_per_block(cls, settings: ConfigDict) -> int:
        return math.prod(_axes(len(SIDES[settings.sides]), settings.num_groups, settings.per_group))

    @classmethod
    def prompt_mask(cls, settings: ConfigDict) -> np.ndarray | None:
        group_of = prompt_groups(len(SIDES[settings.sides]), settings.num_groups, settings.per_group)
        return prompt_mask(settings.attention_mask, group_of)

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        return f"group prompts (sides {settings.sides}, {settings.num_groups} groups of {settings.per_group})"

    @classmethod
    def group_structure(cls, settings: ConfigDict) -> tuple[str, int, int]:
        return settings.sides, settings.num_groups, settings.per_group

    @classmethod
    def mistakes(cls, settings: ConfigDict) -> list[str]:
        number = cls.prompts_per_block(settings)  # `count` is not a setting of group prompts
        if number > _MOST_PROMPTS:
            return [f"model.prompts has {number:,} prompts in each block, above {_MOST_PROMPTS:,}: lower per_group"]
        return []


def _axes(sides: int, groups: int, per_group: int) -> tuple[int, int, int]:
    """Return the sizes of the axes (side, expert, group) into which the P prompts can be reshaped.

    With M = `per_group` experts and G = `groups`, prompt s·M·G + e·G + g belongs to side s, expert e and group g, as in
    the authors' checkpoints.
    """
    return sides, per_group, groups


def prompt_coordinates(sides: int, groups: int, per_group: int) -> np.ndarray:
    """Return i32[P,3], P = sides·groups·per_group: the (side, expert, group) of each prompt, ordered by `_axes`."""
    return np.indices(_axes(sides, groups, per_group)).reshape(3, -1).T.astype(np.int32)


def prompt_groups(sides: int, groups: int, per_group: int) -> np.ndarray:
    """Return i32[P]: the side and group of each prompt, numbered side·groups + group, see `prompt_coordinates`."""
    side, _, group = prompt_coordinates(sides, groups, per_group).T
    return side * groups + group


def split_sides(tokens: jax.Array, sides: Sequence[str], per_group: int, groups: int) -> dict[str, jax.Array]:
    """Split prompts f32[B,P,D], in the order of `prompt_coordinates`, by side: f32[B,M,G,D] per side."""
    split = tokens.reshape(tokens.shape[0], *_axes(len(sides), groups, per_group), tokens.shape[-1])
    return dict(zip(sides, jnp.moveaxis(split, 1, 0), strict=True))


def side_groups(settings: ConfigDict, space: LabelSpace) -> dict[str, np.ndarray]:
    """Return {side: i32[K], the group of each label} for the sides in `settings` (`config.model.prompts`)."""
    groups = {"co": space.co_group, "dc": space.dc_group}
    return {side: groups[side] for side in SIDES[settings.sides]}


def prompt_mask(kind: str, group_of: np.ndarray) -> np.ndarray | None:
    """Return bool[P,P], True if a prompt (row) may attend to a prompt (column); None = all True.

    `kind` says which prompts are masked. With `all_prompts`, each prompt attends only to itself (the authors' code).
    With `cross_group`, prompts attend only to prompts of their own group (ML-VPT, sec. 4.2). With `none`, the result is
    None. `group_of` i32[P] is the group of each prompt, see `prompt_groups`.
    """
    if kind == "none":
        return None
    if kind == "all_prompts":
        return np.eye(len(group_of), dtype=bool)
    return group_of[:, None] == group_of[None, :]
