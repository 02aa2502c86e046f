"""GVPT: group prompts without experts and gates, the ablation of ML-VPT that keeps the grouping alone."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import PROMPTS, Features, Prediction
from mlmoe_jax.models.heads.group_experts import LabelClassifier, by_side, combine_sides, pick


class GroupLinearHead(nnx.Module):
    """A classifier a side on the mean of the prompts of each label's group (GVPT; with one side VPT-CO, VPT-DC).

    The ML-VPT paper (sec. 4.3) does not say how the M prompts of a group join; their mean is the only way without
    parameters, and the published count has none (0.39 M).

    group_of: {side: the group of every label}, of `co`, `dc` or both.
    combine: how two sides are joined, see `combine_sides`.
    """

    read = (PROMPTS,)
    by_label = True  # labels may lie over the mesh, see models.partition

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
        for name, of in self.group_of:
            setattr(self, name, LabelClassifier(width, len(of), rngs=rngs))

    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        """Classify `features.prompts` f32[B,P,D] into K labels; gives the sides' logits as terms `co`, `dc`."""
        sides = [name for name, _ in self.group_of]
        prompts = partition.gathered(features.prompts).astype(jnp.float32)
        tokens = by_side(prompts, sides, self.per_group, self.groups)
        terms = {}
        for name, group_of in self.group_of:
            classifier, joined = getattr(self, name), tokens[name].mean(axis=1)
            votes = jnp.einsum("bgd,kd->bgk", joined, classifier.kernel[...])
            terms[name] = pick(votes, group_of) + classifier.bias[...]
        return Prediction(combine_sides(list(terms.values()), self.combine), terms)

    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return the multiply-adds an image that the papers count (one classifier), and those of the second side."""
        one = getattr(self, self.group_of[0][0]).kernel.size
        return one, (len(self.group_of) - 1) * one
