"""The decoder of MLMoE, whose label queries read the patches and the prompts of their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from mlmoe_jax.models.adapters.group_prompts import prompt_groups
from mlmoe_jax.models.layers.initializers import Constant
from mlmoe_jax.models.outputs import PATCHES, PROMPTS, Features
from mlmoe_jax.models.query_decoder import QueryDecoder


def label_prompt_mask(group_of: Mapping[str, Sequence[int]], groups: int, per_group: int) -> np.ndarray:
    """Return bool[K,P], True if a prompt belongs to a group of the label. Prompts are ordered as in `prompt_groups`."""
    side_and_group = prompt_groups(len(group_of), groups, per_group)
    labels = enumerate(group_of.values())
    masks = [np.asarray(group)[:, None] + side * groups == side_and_group for side, group in labels]
    return np.any(masks, axis=0)


class GroupTokenDecoder(QueryDecoder):
    """A query decoder whose memory is all patches and, per label, the prompts of its groups (MLMoE).

    MLMoE combines two papers: group prompts in a frozen ViT (ML-VPT), and label queries with experts (DR-MoE). The
    prompts of other groups are masked, so that a label is predicted from the image and from its own groups, not from
    evidence for other labels.

    Args:
      channels: C.
      group_of: {side: the group of each label}.
      groups: number of groups per side.
      per_group: number of prompts per group.
      **settings: arguments of QueryDecoder.
    """

    read = (PROMPTS, PATCHES)

    def __init__(
        self, channels: int, group_of: Mapping[str, Sequence[int]], *, groups: int, per_group: int, **settings: Any
    ):
        super().__init__(channels, len(next(iter(group_of.values()))), **settings)
        self.visible_prompts = Constant(label_prompt_mask(group_of, groups, per_group))

    def __call__(self, features: Features, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Return one feature per label, f32[B,K,D], from `features.patches` f32[B,N,C] and `.prompts` f32[B,P,C]."""
        return super().__call__(features, extra=features.prompts, extra_mask=self.visible_prompts.value, rngs=rngs)

    def attention(self, features: Features) -> jax.Array:
        """Return the attention of each label over patches, f32[B,K,N]. A row sums to 1 minus the weights of prompts."""
        return super().attention(features, extra=features.prompts, extra_mask=self.visible_prompts.value)

    def published_macs(self, tokens: int, extra: int = 0) -> tuple[int, int]:
        return super().published_macs(tokens, extra + self.visible_prompts.value.shape[1])
