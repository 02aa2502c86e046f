"""ML-VPT's head: one expert a prompt, a gate a label over the experts of its group, a classifier a side."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.contracts import PROMPTS, Features, Prediction
from mlmoe_jax.models.experts import BottleneckExpert, LabelGates, apply_bank, make_bank
from mlmoe_jax.models.initializers import torch_linear

COMBINE = ("mean_logit", "mean_probability")


class LabelClassifier(nnx.Module):
    """A weight vector and a bias for every label, applied to that label's own feature."""

    def __init__(self, width: int, labels: int, *, rngs: nnx.Rngs):
        draw = torch_linear(width)
        self.kernel = nnx.Param(draw(rngs.params(), (labels, width)))
        self.bias = nnx.Param(draw(rngs.params(), (labels,)))


class Side(nnx.Module):
    """Gates, and a classifier unless the sides share one, for one way to group the labels (CO or DC)."""

    def __init__(
        self,
        width: int,
        group_of: Sequence[int],
        groups: int,
        per_group: int,
        *,
        gate_bias: str,
        own_classifier: bool,
        rngs: nnx.Rngs,
    ):
        self.group_of, self.groups = tuple(int(group) for group in group_of), groups
        self.gate = LabelGates(width, len(self.group_of), per_group, bias=gate_bias, rngs=rngs)
        self.classifier = LabelClassifier(width, len(self.group_of), rngs=rngs) if own_classifier else None

    def gate_logits(self, tokens: jax.Array) -> jax.Array:
        """Return every label's gate logits from its own group's prompts: f32[B,M,G,D] -> f32[B,M,K]."""
        return self.pick(self.gate.scores(tokens)) + self.gate.added_bias()

    def pick(self, values: jax.Array) -> jax.Array:
        """Pick for every label the entry of its own group: f32[B,M,G,K] -> f32[B,M,K].

        Computing all G entries in one matrix product and picking afterwards is far cheaper than gathering the label's
        tokens into [B,M,K,D] first.
        """
        member = np.arange(self.groups)[:, None] == np.asarray(self.group_of)
        return jnp.sum(values, axis=2, where=member)


class GroupExpertsHead(nnx.Module):
    """The group-aware mixture of experts of ML-VPT (sec. 3.3–3.4) on the prompts of the last block.

    terms: `co`, `dc` are the classifiers' logits on the label features Σₑ w·E(z) (eq. 15–16); `co_gate`, `dc_gate` are
    the gates' own logits weighted by themselves, Σₑ w·g, which the authors' code supervises as well.
    gates: `co`, `dc` f32[B,K,M].
    combine: `mean_logit` reports σ((co + dc)/2) as the code does, `mean_probability` (σ(co) + σ(dc))/2 (eq. 17).
    """

    read = (PROMPTS,)
    sides = ("co", "dc")

    def __init__(
        self,
        width: int,
        co_group: Sequence[int],
        dc_group: Sequence[int],
        *,
        groups: int,
        per_group: int,
        hidden: int = 5,
        activation: str = "gelu",
        gate_bias: str = "unused",
        combine: str = "mean_logit",
        shared_classifier: bool = False,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        if combine not in COMBINE:
            raise ValueError(f"combine is one of {COMBINE}, not {combine!r}")
        self.groups, self.per_group, self.combine = groups, per_group, combine

        def expert(rngs: nnx.Rngs) -> BottleneckExpert:
            return BottleneckExpert(width, hidden, activation=activation, dtype=dtype, rngs=rngs)

        def side(group_of: Sequence[int]) -> Side:
            return Side(
                width, group_of, groups, per_group, gate_bias=gate_bias, own_classifier=not shared_classifier, rngs=rngs
            )

        self.bank = make_bank(expert, len(self.sides) * groups * per_group, rngs)
        self.co, self.dc = side(co_group), side(dc_group)
        self.classifier = LabelClassifier(width, len(co_group), rngs=rngs) if shared_classifier else None

    def experts(self, tokens: jax.Array) -> jax.Array:
        """Let every expert work on its own prompt: f32[B,P,D] -> f32[B,P,D]."""
        return apply_bank(self.bank, tokens)

    def gates(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """Return the routing weights of each side for prompts f32[B,P,D]: f32[B,K,M]."""
        return _weights(self._gate_logits(tokens))

    def __call__(self, features: Features) -> Prediction:
        """Classify `features.prompts` f32[B,P,D] into K labels."""
        tokens = features.prompts.astype(jnp.float32)
        gate_logits = self._gate_logits(tokens)
        gates = _weights(gate_logits)
        worked = self._by_side(self.experts(tokens).astype(jnp.float32))
        terms = {}
        for name in self.sides:
            side = getattr(self, name)
            classifier = side.classifier or self.classifier
            # V·Σₑ wₑEₑ = Σₑ wₑ(V·Eₑ): voting before mixing keeps label features [B,K,D] off the path
            votes = side.pick(jnp.einsum("bmgd,kd->bmgk", worked[name], classifier.kernel[...]))
            weights = jnp.moveaxis(gates[name], 2, 1)
            terms[name] = jnp.sum(weights * votes, axis=1) + classifier.bias[...]
            terms[f"{name}_gate"] = jnp.sum(weights * gate_logits[name], axis=1)
        return Prediction(self._combine(terms["co"], terms["dc"]), terms, gates)

    def _gate_logits(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """f32[B,P,D] -> a side: f32[B,M,K]."""
        by_side = self._by_side(tokens)
        return {name: getattr(self, name).gate_logits(by_side[name]) for name in self.sides}

    def _by_side(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """f32[B,P,D] -> a side: f32[B,M,G,D]."""
        shape = (tokens.shape[0], len(self.sides), self.per_group, self.groups, tokens.shape[-1])
        return dict(zip(self.sides, jnp.moveaxis(tokens.reshape(shape), 1, 0), strict=True))

    def _combine(self, co: jax.Array, dc: jax.Array) -> jax.Array:
        if self.combine == "mean_logit":
            return (co + dc) / 2
        # the logit of the mean of two sigmoids; log-sigmoids keep it finite where a sigmoid rounds to 0 or 1
        yes = jnp.logaddexp(jax.nn.log_sigmoid(co), jax.nn.log_sigmoid(dc))
        no = jnp.logaddexp(jax.nn.log_sigmoid(-co), jax.nn.log_sigmoid(-dc))
        return yes - no


def _weights(gate_logits: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A side: f32[B,M,K] -> routing weights f32[B,K,M], which sum to 1 over the experts."""
    return {name: jnp.moveaxis(jax.nn.softmax(logits, axis=1), 1, 2) for name, logits in gate_logits.items()}
