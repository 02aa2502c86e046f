"""The head of DR-MoE and its relatives: a feature per label from a query decoder, routed over shared and task experts.

DR-MoE (Dynamic Routing Mixture of Experts, an anonymous submission to ICLR 2025 that was rejected) has no published
code. If its equations and its text disagree, there is an option for both. HSQ (Hybrid Sharing Query, Yin et al., ICLR
2024) has no published code either and is described in less detail: the settings `hsq` are a RECONSTRUCTION.
"""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.models import partition
from mlmoe_jax.models.adapters.catalog import prompts_of
from mlmoe_jax.models.adapters.groups import groups_by_side
from mlmoe_jax.models.contracts import LABELS, Features, Head, Prediction
from mlmoe_jax.models.experts import Gates, LabelExperts, combine, gate_entropy
from mlmoe_jax.models.heads.mlmoe import GroupTokenDecoder
from mlmoe_jax.models.layers.initializers import torch_linear
from mlmoe_jax.models.partition import LABEL, axes
from mlmoe_jax.models.query_decoder import QueryDecoder, decoder_settings, fixed_queries

# The sign of λ·H in the loss.
ENTROPY = {"paper": 1.0, "maximize": -1.0, "off": 0.0}

_DR_MOE = {
    "expert": "relu_linear",
    "expert_hidden": 256,
    "shared_experts": 4,
    "task_experts": 1,
    "gate": "mlp",
    "gate_hidden": 256,
    "gate_share": "per_label",
    "classifier": "per_label",
    "entropy": "maximize",
    "entropy_weight": 0.01,
}
# Settings of RoutedExpertsHead by name:
#   recommended  DR-MoE with one classifier per label (a shared bias cannot fit the frequencies of all labels) and an
#                entropy term with the effect that the text describes
#   literal      as printed: the classifier (DR-MoE, eq. 9) has no label index, and the sign of the entropy term
#                (DR-MoE, eq. 11) lowers the entropy
#   static       `recommended` with gates that do not depend on the image, the ablation of dynamic routing
#   hsq          the RECONSTRUCTION of HSQ: one linear gate and several task experts per label, feed-forward experts, no
#                entropy term; depth, widths and numbers of experts are our choice
SETTINGS: dict[str, dict[str, str | int | float]] = {
    "recommended": _DR_MOE,
    "literal": _DR_MOE | {"classifier": "shared", "entropy": "paper"},
    "static": _DR_MOE | {"gate": "static"},
    "hsq": _DR_MOE | {"expert": "ffn", "task_experts": 2, "gate": "linear", "entropy": "off"},
}


class FeatureClassifier(nnx.Module):
    """⟨v_k, o_k⟩ + b_k for one feature per label; `shared`: one v and b for all labels (DR-MoE, eq. 9 as printed)."""

    def __init__(self, width: int, labels: int, *, share: str = "per_label", rngs: nnx.Rngs):
        rows, owner = (labels, LABEL) if share == "per_label" else (1, None)
        self.per_label, draw = share == "per_label", torch_linear(width)
        self.kernel = nnx.Param(draw(rngs.params(), (rows, width)), **axes(owner, None))
        self.bias = nnx.Param(draw(rngs.params(), (rows,)), **axes(owner))

    def __call__(self, features: Float[ArrayLike, "b k o"]) -> Float[Array, "b k"]:
        kernel = self.kernel[...]
        votes = jnp.einsum("bko,ko->bk", features, kernel) if self.per_label else features @ kernel[0]
        return votes + self.bias[...]


def entropy_penalty(gates: Float[ArrayLike, "b k e"], sign: str, weight: float) -> Float[Array, " b"]:
    """Return ±λ · mean over labels of H(w), in nats, with λ = `weight`; static gates are of one image.

    sign: `paper` is DR-MoE, eq. 11, as printed: −λ Σ w log w added to the loss. It LOWERS the entropy and collapses the
    gates onto one expert each, the opposite of its stated purpose. `maximize` has the sign that raises the entropy.
    """
    return ENTROPY[sign] * weight * jnp.mean(gate_entropy(gates), axis=-1)


class RoutedExpertsHead(Head):
    """DR-MoE: label features h_i from a query decoder, a dense mixture of shared and task experts, a classifier.

    decoder: a module that maps the features in its attribute `read` to one feature per label,
    `decoder(features, rngs=rngs)` -> f32[B,K,width], with the methods `published_macs(tokens)`,
    `norm_macs(tokens)` and `attention(features)` -> f32[B,K,N]. After the decoder, labels are independent: parameters
    per label are stacked along a leading axis K.
    expert, expert_hidden, shared_experts, task_experts: see LabelExperts. gate, gate_hidden, gate_share: see Gates.
    classifier: `per_label` or `shared`, see FeatureClassifier.
    entropy, entropy_weight: sign and λ of the penalty `entropy`, see entropy_penalty; `off`: no penalty.
    SETTINGS has named sets of these choices; the defaults are `recommended`, and `hsq` is a reconstruction of HSQ.

    gates: `experts` f32[B,K,E] (static gates: f32[1,K,E]), experts in the order [shared…, task…].
    """

    by_label = uses_groups = True

    def __init__(
        self,
        decoder: nnx.Module,
        width: int,
        labels: int,
        *,
        expert: str = "relu_linear",
        expert_hidden: int = 256,
        shared_experts: int = 4,
        task_experts: int = 1,
        gate: str = "mlp",
        gate_hidden: int = 256,
        gate_share: str = "per_label",
        classifier: str = "per_label",
        entropy: str = "maximize",
        entropy_weight: float = 0.01,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        self.decoder, self.read = decoder, decoder.read
        self.entropy, self.entropy_weight = entropy, entropy_weight
        self.experts = LabelExperts(
            width,
            labels,
            kind=expert,
            hidden=expert_hidden,
            shared=shared_experts,
            task=task_experts,
            dtype=dtype,
            rngs=rngs,
        )
        self.gates = Gates(
            width,
            labels,
            self.experts.entries,
            kind=gate,
            hidden=gate_hidden,
            share=gate_share,
            dtype=dtype,
            rngs=rngs,
        )
        self.classifier = FeatureClassifier(self.experts.out_width, labels, share=classifier, rngs=rngs)
        self._classifier_macs = labels * self.experts.out_width

    @classmethod
    def from_config(
        cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> Self:
        prompts, labels = config.model.prompts, len(space.names)
        settings = decoder_settings(config.model.head.decoder, width) | {"dtype": dtype, "rngs": rngs}
        if prompts_of(config).uses_groups:
            group_of, place = groups_by_side(prompts, space), (prompts.num_groups, prompts.per_group)
            decoder = GroupTokenDecoder(width, group_of, groups=place[0], per_group=place[1], **settings)
        else:
            decoder = QueryDecoder(width, labels, **settings)
        return cls(decoder, decoder.width, labels, **config.model.head.routing, dtype=dtype, rngs=rngs)

    @classmethod
    def gate_entries(cls, config: ConfigDict) -> dict[str, list[str]]:
        routing = config.model.head.routing
        counts = {"shared": routing.shared_experts, "task": routing.task_experts}
        return {"experts": [f"{kind} {e + 1}" for kind, count in counts.items() for e in range(count)]}

    @classmethod
    def frozen_rules(cls, config: ConfigDict) -> tuple[tuple[str, bool], ...]:
        return fixed_queries(config.model.head.decoder)

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        wrong, routing = [], config.model.head.routing
        if not routing.shared_experts + routing.task_experts:
            wrong.append("model.head.routing.shared_experts and task_experts are both 0, and a label needs an expert")
        if config.model.head.decoder.queries:
            wrong.append("model.head.decoder.queries is for head query; routed_experts has one query per label")
        return wrong

    @classmethod
    def warnings(cls, config: ConfigDict) -> list[str]:
        routing = config.model.head.routing
        if routing.entropy == "paper" and routing.entropy_weight > 0:
            return [
                "model.head.routing.entropy=paper adds the entropy of the gates to the loss as printed in DR-MoE, "
                "which drives each gate to one expert, the opposite of its stated purpose; maximize has the other sign"
            ]
        return []

    def __call__(
        self, features: Features, *, labels: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> Prediction:
        queried = partition.by_label(self.decoder(features, rngs=rngs))
        gates = self.gates(queried)
        logits = self.classifier(combine(gates, self.experts(queried)))
        penalties = {}
        if self.entropy != "off":
            penalty = entropy_penalty(gates, self.entropy, self.entropy_weight)
            penalties["entropy"] = jnp.broadcast_to(penalty, logits.shape[:1])
        return Prediction(logits, gates={"experts": gates}, penalties=penalties)

    def attention(self, features: Features) -> dict[str, jax.Array]:
        return {LABELS: self.decoder.attention(features)}

    def published_macs(self, tokens: int) -> tuple[int, int]:
        """Return the multiply-adds per image with N = `tokens` patches: of layers, and those of experts and gates."""
        layers, extra = self.decoder.published_macs(tokens)
        return layers + self._classifier_macs, extra + self.experts.macs() + self.gates.macs()

    def norm_macs(self, tokens: int) -> int:
        return self.decoder.norm_macs(tokens)
