"""MLMoE joins both papers: ML-VPT's group prompts in the frozen ViT, DR-MoE's label queries and experts on top."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from mlmoe_jax.models.contracts import PATCHES, PROMPTS, Features
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.models.prompts import prompt_groups
from mlmoe_jax.models.query_decoder import QueryDecoder


def own_prompts(group_of: Mapping[str, Sequence[int]], groups: int, per_group: int) -> np.ndarray:
    """Return bool[K,P], True where a prompt is of a label's own group on its side, prompts as in `prompt_groups`."""
    side_and_group = prompt_groups(len(group_of), groups, per_group)
    own = [np.asarray(of)[:, None] + side * groups == side_and_group for side, of in enumerate(group_of.values())]
    return np.any(own, axis=0)


class GroupTokenDecoder(QueryDecoder):
    """A query decoder whose memory is all patches and, for each label, the prompts of its own groups.

    What a group's prompts have gathered in the last block is evidence for the labels of that group and is kept from the
    others, so that a label is read from the picture and from its own groups, not from what else is in it.

    group_of: {side: the group of every label}. groups, per_group: of the prompts. settings: those of QueryDecoder.
    """

    read = (PROMPTS, PATCHES)

    def __init__(
        self, channels: int, group_of: Mapping[str, Sequence[int]], *, groups: int, per_group: int, **settings: Any
    ):
        super().__init__(channels, len(next(iter(group_of.values()))), **settings)
        self.sees = Constant(own_prompts(group_of, groups, per_group))

    def __call__(self, features: Features, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Return a feature a label f32[B,K,D] from `features.patches` f32[B,N,C] and `features.prompts` f32[B,P,C]."""
        return super().__call__(features, extra=features.prompts, extra_mask=self.sees, rngs=rngs)

    def attention(self, features: Features) -> jax.Array:
        """Return how much each label looks at each patch, f32[B,K,N]; what its prompts get is missing to 1."""
        return super().attention(features, extra=features.prompts, extra_mask=self.sees)

    def published_macs(self, tokens: int, extra: int = 0) -> tuple[int, int]:
        """Return the multiply-adds an image with N = `tokens` patches, see QueryDecoder."""
        return super().published_macs(tokens, extra + self.sees.value.shape[1])
