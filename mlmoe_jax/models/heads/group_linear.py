"""GVPT: group prompts without experts and gates, the ablation of ML-VPT that keeps only the grouping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models import partition
from mlmoe_jax.models.adapters.groups import SIDES, by_side, groups_by_side
from mlmoe_jax.models.contracts import PROMPTS, Features, Head, Prediction
from mlmoe_jax.models.heads.group_experts import LabelClassifier, combine_sides, pick


class GroupLinearHead(Head):
    """One classifier per side on the mean of the prompts of each label's group (GVPT; with one side VPT-CO, VPT-DC).

    The paper does not specify how the M prompts of a group are combined (ML-VPT, sec. 5.3). Their mean needs no
    parameters, which agrees with the published parameter count (0.39 M).

    group_of: {side: the group of each label}, for `co`, `dc` or both; the logits of the sides are the terms.
    combine: how the two sides are combined, see `combine_sides`.
    """

    read = (PROMPTS,)
    by_label = True
    needs_group_prompts = uses_groups = True

    def __init__(
        self,
        width: int,
        group_of: Mapping[str, Sequence[int]],
        *,
        groups: int,
        per_group: int,
        combine: str = "mean_logit",
        rngs: nnx.Rngs,
    ):
        self.groups, self.per_group, self.combine = groups, per_group, combine
        self.group_of = tuple((name, tuple(int(group) for group in of)) for name, of in group_of.items())

        def classifier(side: str) -> LabelClassifier | None:
            return LabelClassifier(width, len(group_of[side]), rngs=rngs) if side in group_of else None

        self.co, self.dc = classifier("co"), classifier("dc")

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        return ["model.head.shared_classifier is for group_experts"] if config.model.head.shared_classifier else []

    @classmethod
    def from_config(
        cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> Self:
        prompts = config.model.prompts
        return cls(
            width,
            groups_by_side(prompts, space),
            groups=prompts.num_groups,
            per_group=prompts.per_group,
            combine=config.model.head.combine,
            rngs=rngs,
        )

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        return ("logits", *SIDES.get(config.model.prompts.sides, ()))

    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        sides, classifiers = [name for name, _ in self.group_of], {"co": self.co, "dc": self.dc}
        prompts = partition.gathered(features.prompts).astype(jnp.float32)
        tokens = by_side(prompts, sides, self.per_group, self.groups)
        terms = {}
        for name, group_of in self.group_of:
            classifier, means = classifiers[name], tokens[name].mean(axis=1)
            votes = jnp.einsum("bgd,kd->bgk", means, classifier.kernel[...])
            terms[name] = pick(votes, group_of) + classifier.bias[...]
        return Prediction(combine_sides(list(terms.values()), self.combine), terms)

    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return the multiply-adds per image that the papers count (one classifier), and those of the second side."""
        one = (self.co or self.dc).kernel.size
        return one, (len(self.group_of) - 1) * one
