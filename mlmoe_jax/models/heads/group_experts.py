"""Heads on group prompts: ML-VPT's head with experts and gates, and GVPT's head, its ablation without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models import partition
from mlmoe_jax.models.adapters.group_prompts import SIDES, side_groups, split_sides
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.experts import BottleneckExpert, LabelGates, apply_bank, make_bank
from mlmoe_jax.models.heads.linear import LabelClassifier
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.outputs import LABELS, PROMPTS, Features, Prediction
from mlmoe_jax.models.partition import LABEL, PROMPT


class Side(nnx.Module):
    """The gates and the classifier of one side, one of the two groupings of the labels in ML-VPT, `co` or `dc`.

    `group_of` is the group of each label on this side. There is a gate per `label` or per `group` (`gates_of`).
    `gate_bias` is the `bias` of LabelGates.
    """

    def __init__(
        self,
        width: int,
        group_of: Sequence[int],
        groups: int,
        per_group: int,
        *,
        gate_bias: str,
        gates_of: str,
        rngs: nnx.Rngs,
    ):
        self.group_of = tuple(int(group) for group in group_of)
        self.gates_of = gates_of
        owners, owner = (len(self.group_of), LABEL) if gates_of == "label" else (groups, PROMPT)
        self.gate = LabelGates(width, owners, per_group, owner=owner, bias=gate_bias, rngs=rngs)
        self.classifier = LabelClassifier(width, len(self.group_of), rngs=rngs)

    def gate_logits(self, tokens: Float[ArrayLike, "b m g d"]) -> Float[Array, "b m k"]:
        """Return the gate logits of each label over the M experts, computed from the prompts of its group."""
        if self.gates_of == "group":
            return (self.gate.group_scores(tokens) + self.gate.added_bias())[..., np.asarray(self.group_of)]
        return select_group(self.gate.scores(tokens), self.group_of) + self.gate.added_bias()


def select_group(values: Float[ArrayLike, "*rows g k"], group_of: Sequence[int]) -> Float[Array, "*rows k"]:
    """Return `values[..., group_of[k], k]` for each label k: the value for the group of the label.

    One matmul for all G groups and a selection are much cheaper than tokens gathered per label, [B,M,K,D].
    """
    member = np.arange(values.shape[-2])[:, None] == np.asarray(group_of)
    return jnp.sum(values, axis=-2, where=member)


def combine_sides(sides: Sequence[Float[ArrayLike, "b k"]], how: str) -> Float[Array, "b k"]:
    """Return the combined logits of one or two sides.

    `mean_logit` is the mean of the logits, and `mean_probability` the logit of the mean of the probabilities.
    """
    if len(sides) == 1 or how == "mean_logit":
        return sum(sides) / len(sides)
    # Log-sigmoids keep the logit finite even if a sigmoid rounds to 0 or 1.
    yes = jnp.logaddexp(*(jax.nn.log_sigmoid(logits) for logits in sides))
    no = jnp.logaddexp(*(jax.nn.log_sigmoid(-logits) for logits in sides))
    return yes - no


class _GroupHead(Head):
    """The base class of heads that classify each label from the prompts of its group.

    Args:
      group_of: {side: the group of each label}. A side is a grouping of the labels: `co`, `dc` or both.
      combine: how the reported probability is computed from the logits co and dc of the sides. `mean_logit` is σ((co +
        dc)/2), as in the authors' code. `mean_probability` is (σ(co) + σ(dc))/2, as in the text of the paper.
    """

    read = (PROMPTS,)
    by_label = True
    needs_group_prompts = uses_groups = True

    def __init__(
        self, group_of: Mapping[str, Sequence[int]], *, groups: int, per_group: int, combine: str = "mean_logit"
    ):
        self.groups = groups
        self.per_group = per_group
        self.combine = combine
        self.sides = tuple(group_of)
        self.labels = len(next(iter(group_of.values())))
        self.group_of = tuple((name, tuple(int(group) for group in labels)) for name, labels in group_of.items())

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        prompts = config.model.prompts
        sizes = {"groups": prompts.num_groups, "per_group": prompts.per_group}
        options = cls.options(config.model.head, dtype)
        return cls(width, side_groups(prompts, space), **sizes, **options, rngs=rngs)

    @classmethod
    def options(cls, head: ConfigDict, dtype: Dtype) -> dict[str, Any]:
        return {"combine": head.combine}

    def _sides(self) -> dict[str, Any]:
        """Return the attributes `co` and `dc`, as far as the head has these sides, by name."""
        return {name: getattr(self, name) for name in self.sides}

    def _by_side(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """Return the prompts of each side, {side: f32[B,M,G,D]}, for `tokens` f32[B,P,D]."""
        return split_sides(tokens, self.sides, self.per_group, self.groups)

    def attention(self, features: Features) -> dict[str, jax.Array]:
        """Return {`labels`: f32[B,K,N]}, the attention of the prompts of a label's groups, weighted by the gates.

        Without gates, the prompts of a group have equal weights. It is the mean over the sides.
        """
        gates, maps, sides = self(features).gates, self._by_side(features.attention[PROMPTS]), []
        equal = jnp.full((1, self.labels, self.per_group), 1 / self.per_group)
        for name, group_of in self.group_of:
            members = np.eye(self.groups, dtype=np.float32)[list(group_of)][:, None]
            weights = gates.get(name, equal)[..., None] * members  # [B,K,M,G]
            weights = weights.reshape(*weights.shape[:2], -1)
            sides.append(weights @ maps[name].reshape(maps[name].shape[0], weights.shape[2], -1))
        return {LABELS: sum(sides) / len(sides)}


class GroupExpertsHead(_GroupHead):
    """The group-aware mixture of experts of ML-VPT on the prompts of the last block (ML-VPT, sec. 4.3–4.4).

    A side is a grouping of the labels, `co` or `dc`. On each side, a label belongs to one group, and the group has M
    prompts z with one expert E per prompt. The gate of the label gives gate logits g and routing weights w, which are
    the softmax of g over the M experts. The feature of the label is Σₑ w·E(z). A classifier maps it to a logit (ML-VPT,
    eq. 14–16).

    `Prediction.terms` has these logits as `co` and `dc`. It also has the weighted gate logits Σₑ w·g as `co_gate` and
    `dc_gate`, which have a loss in the authors' code, too. `Prediction.gates` has the routing weights w f32[B,K,M] as
    `co` and `dc`.

    Args:
      gates_of: one gate per `label` (strategy 2 of the paper, used by its model) or per `group` (strategy 1).
    """

    def __init__(
        self,
        width: int,
        group_of: Mapping[str, Sequence[int]],
        *,
        gates_of: str = "label",
        hidden: int = 5,
        activation: str = "gelu",
        gate_bias: str = "unused",
        dtype: Dtype = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        super().__init__(group_of, **settings)

        def expert(rngs: nnx.Rngs) -> BottleneckExpert:
            return BottleneckExpert(width, hidden, activation=activation, dtype=dtype, rngs=rngs)

        self.bank = make_bank(expert, len(self.sides) * self.groups * self.per_group, rngs, PROMPT)
        options = {"gate_bias": gate_bias, "gates_of": gates_of, "rngs": rngs}
        sizes = self.groups, self.per_group
        sides = {name: Side(width, labels, *sizes, **options) for name, labels in group_of.items()}
        self.co = sides.get("co")
        self.dc = sides.get("dc")

    @classmethod
    def options(cls, head: ConfigDict, dtype: Dtype) -> dict[str, Any]:
        return {
            **super().options(head, dtype),
            "gates_of": head.gates_of,
            "hidden": head.expert_hidden,
            "activation": head.activation,
            "gate_bias": head.gate_bias,
            "dtype": dtype,
        }

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        sides = SIDES.get(config.model.prompts.sides, ())
        return ("logits", *sides, *(f"{side}_gate" for side in sides))

    @classmethod
    def gate_entries(cls, config: ConfigDict) -> dict[str, list[str]]:
        experts = [f"expert {e + 1}" for e in range(config.model.prompts.per_group)]
        return {side: experts for side in SIDES[config.model.prompts.sides]}

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        tokens = partition.shard_images(features.prompts).astype(jnp.float32)
        by_side = self._by_side(tokens)
        gate_logits = {name: side.gate_logits(by_side[name]) for name, side in self._sides().items()}
        gates = {name: jnp.moveaxis(jax.nn.softmax(logits, axis=1), 1, 2) for name, logits in gate_logits.items()}
        outputs = self._by_side(apply_bank(self.bank, tokens).astype(jnp.float32))
        terms = {}
        for name, side in self._sides().items():
            classifier = side.classifier
            # V·Σₑ wₑEₑ = Σₑ wₑ(V·Eₑ). The second form needs no label features [B,K,D].
            votes = select_group(jnp.einsum("bmgd,kd->bmgk", outputs[name], classifier.kernel[...]), side.group_of)
            weights = jnp.moveaxis(gates[name], 2, 1)
            terms[name] = jnp.sum(weights * votes, axis=1) + classifier.bias[...]
            terms[f"{name}_gate"] = jnp.sum(weights * gate_logits[name], axis=1)
        return Prediction(combine_sides([terms[name] for name in self.sides], self.combine), terms, gates)

    def published_macs(self, tokens: int, counted: int) -> tuple[int, int]:
        """Return (multiply-adds of one classifier, which the papers report; multiply-adds of everything else)."""
        width, hidden = self.bank.up.kernel.shape[1:]
        experts = len(self.sides) * self.groups * self.per_group * 2 * width * hidden
        gate_owners = sum(side.gate.kernel.shape[1] for side in self._sides().values())
        gates = gate_owners * self.per_group * width
        mixing = len(self.sides) * self.labels * self.per_group * width
        return self.labels * width, experts + gates + mixing + (len(self.sides) - 1) * self.labels * width


class GroupLinearHead(_GroupHead):
    """A linear classifier per side on the mean of the prompts of each label's group.

    A side is a grouping of the labels, `co` or `dc`. With both sides, this is the baseline GVPT. With one side, it is
    VPT-CO or VPT-DC. The paper does not specify how the M prompts of a group are combined (ML-VPT, sec. 5.3). A mean
    needs no parameters, which agrees with the published parameter count (0.39 M). `Prediction.terms` has the logits of
    each side, `co` and `dc`.
    """

    def __init__(self, width: int, group_of: Mapping[str, Sequence[int]], *, rngs: nnx.Rngs, **settings: Any):
        super().__init__(group_of, **settings)
        classifiers = {name: LabelClassifier(width, len(labels), rngs=rngs) for name, labels in group_of.items()}
        self.co = classifiers.get("co")
        self.dc = classifiers.get("dc")

    @classmethod
    def terms(cls, config: ConfigDict) -> tuple[str, ...]:
        return ("logits", *SIDES.get(config.model.prompts.sides, ()))

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        classifiers = self._sides()
        tokens = self._by_side(partition.shard_images(features.prompts).astype(jnp.float32))
        terms = {}
        for name, group_of in self.group_of:
            classifier = classifiers[name]
            votes = jnp.einsum("bgd,kd->bgk", tokens[name].mean(axis=1), classifier.kernel[...])
            terms[name] = select_group(votes, group_of) + classifier.bias[...]
        return Prediction(combine_sides(list(terms.values()), self.combine), terms)

    def published_macs(self, tokens: int, counted: int) -> tuple[int, int]:
        """Return the multiply-adds of the classifiers: (first side, which the papers report; second side, or 0)."""
        macs = (self.co or self.dc).kernel.size
        return macs, (len(self.group_of) - 1) * macs
