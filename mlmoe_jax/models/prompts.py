"""Learned prompt tokens: how many there are, which group each belongs to, and who may see whom."""

import math

import numpy as np
from flax import nnx

from mlmoe_jax.models.contracts import Prompts
from mlmoe_jax.models.initializers import uniform

MASKS = ("none", "all_prompts", "cross_group")


def prompt_groups(sides: int, groups: int, per_group: int) -> np.ndarray:
    """Return i32[P], P = sides·groups·per_group: the (side, group) of each prompt, numbered side·groups + group.

    The order is that of the authors' checkpoints: side by side, within a side expert by expert, within an expert group
    by group, so expert e of group t on side s is prompt s·M·G + e·G + t.
    """
    side, _, group = np.indices((sides, per_group, groups)).reshape(3, -1)
    return (side * groups + group).astype(np.int32)


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


class DeepPrompts(nnx.Module):
    """One set of P prompt tokens for every block, f32[L,1,P,D] (VPT-deep; ML-VPT, eq. 8).

    Drawn from U(±√(6/(3·patch² + D))), as in the visual-prompt-tuning code.
    """

    def __init__(self, depth: int, width: int, patch: int, *, group_of: np.ndarray, mask: str = "none", rngs: nnx.Rngs):
        draw = uniform(math.sqrt(6 / (3 * patch**2 + width)))
        self.deep = nnx.Param(draw(rngs.params(), (depth, 1, len(group_of), width)))
        self.group_of, self.mask = tuple(int(group) for group in group_of), mask

    def __call__(self) -> Prompts:
        """Return the prompts of all blocks and their mask."""
        return Prompts(self.deep[...], prompt_mask(self.mask, np.asarray(self.group_of)))
