"""The head of DR-MoE and related methods.

A query decoder computes one feature per label. Experts that are shared by all labels, and task experts of the label,
process the feature, and a gate per label mixes the outputs of the experts.

DR-MoE (Dynamic Routing Mixture of Experts, a rejected anonymous submission to ICLR 2025) has no published code. Where
its equations and its text disagree, there is an option for both. HSQ (Hybrid Sharing Query, Yin et al., ICLR 2024) has
no published code either, and a less detailed text: the settings `hsq` are a RECONSTRUCTION.
"""

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
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.adapters.group_prompts import prompt_groups, side_groups
from mlmoe_jax.models.experts import Gates, LabelExperts, gate_entropy, mix_experts
from mlmoe_jax.models.heads.linear import LabelClassifier
from mlmoe_jax.models.heads.query import DecoderHead, pooled_channels
from mlmoe_jax.models.layers.initializers import Constant, Dtype
from mlmoe_jax.models.outputs import LABELS, PATCHES, PROMPTS, Features, Prediction
from mlmoe_jax.models.query_decoder import QueryDecoder

# The sign of λ·H in the loss.
ENTROPY = {"paper": 1.0, "maximize": -1.0, "off": 0.0}

# Settings of RoutedExpertsHead by name, as far as they differ from the defaults of `config.model.head.routing`:
#   recommended  DR-MoE with one classifier per label (a shared bias cannot fit the frequencies of all labels) and an
#                entropy term with the effect that the text describes
#   literal      as printed: the classifier (DR-MoE, eq. 9) has no label index, and the sign of the entropy term
#                (DR-MoE, eq. 11) lowers the entropy
#   static       `recommended` with gates that do not depend on the image, the ablation of dynamic routing
#   hsq          the RECONSTRUCTION of HSQ: one linear gate and several task experts per label, feed-forward experts, no
#                entropy term; depth, widths and numbers of experts are our choice
SETTINGS: dict[str, dict[str, str | int]] = {
    "recommended": {},
    "literal": {"classifier": "shared", "entropy": "paper"},
    "static": {"gate": "static"},
    "hsq": {"expert": "ffn", "task_experts": 2, "gate": "linear", "entropy": "off"},
}


def entropy_penalty(gates: Float[ArrayLike, "b k e"], sign: str, weight: float) -> Float[Array, " b"]:
    """Return ±λ (`weight`) times the entropy of the routing weights in nats, averaged over labels.

    The sign `paper` adds −λ Σ w log w to the loss, which is DR-MoE, eq. 11, as printed. It LOWERS the entropy, so that
    each gate selects a single expert, the opposite of its stated purpose. `maximize` has the other sign, which raises
    the entropy. `off` returns 0.
    """
    return ENTROPY[sign] * weight * jnp.mean(gate_entropy(gates), axis=-1)


def label_prompt_mask(group_of: Mapping[str, Sequence[int]], groups: int, per_group: int) -> np.ndarray:
    """Return bool[K,P], True if a prompt (column), ordered as in `prompt_groups`, belongs to a group of a label (row).

    `group_of` has the group of each label by side, a grouping of the labels, `co` or `dc`.
    """
    side_and_group = prompt_groups(len(group_of), groups, per_group)
    labels = enumerate(group_of.values())
    masks = [np.asarray(group)[:, None] + side * groups == side_and_group for side, group in labels]
    return np.any(masks, axis=0)


class GroupTokenDecoder(QueryDecoder):
    """A query decoder in which each label attends to all patches and to the prompts of its own groups (MLMoE).

    MLMoE combines two papers: group prompts in a frozen ViT (ML-VPT), and label queries with experts (DR-MoE). The
    prompts of other groups are masked, so that a label is predicted from the image and from its own groups, not from
    evidence for other labels. See `label_prompt_mask` for `group_of` and the sizes.
    """

    read = (PROMPTS, PATCHES)

    def __init__(
        self,
        channels: int,
        group_of: Mapping[str, Sequence[int]],
        settings: ConfigDict,
        *,
        groups: int,
        per_group: int,
        **options: Any,
    ):
        super().__init__(channels, len(next(iter(group_of.values()))), settings, **options)
        self.visible_prompts = Constant(label_prompt_mask(group_of, groups, per_group))
        self.extra = self.visible_prompts.value.shape[1]

    def extend(
        self, memory: jax.Array, positions: jax.Array | None, features: Features
    ) -> tuple[jax.Array, jax.Array | None, np.ndarray]:
        """Add the prompts, which are projected like patches, but skip the encoder and have no positions."""
        prompts, visible = self.project_tokens(features.prompts), self.visible_prompts.value
        if positions is not None:
            positions = jnp.pad(positions, ((0, 0), (0, self.extra), (0, 0)))
        mask = np.concatenate([np.ones((len(visible), memory.shape[1]), bool), visible], axis=1)
        return jnp.concatenate([memory, prompts], axis=1), positions, mask


class RoutedExpertsHead(DecoderHead):
    """The head of DR-MoE: a query decoder, a dense mixture of shared and task experts, and a classifier.

    The decoder computes one feature per label. All later layers process labels independently, and parameters per label
    have a leading axis K. `Prediction.gates` has the routing weights `experts` f32[B,K,E] (static gates: f32[1,K,E]),
    with the experts in the order [shared…, task…]. SETTINGS has named values of `routing`; `hsq` is
    a reconstruction of HSQ.

    Args:
      decoder: a module such as QueryDecoder. `decoder(features, rngs=rngs)` returns one feature per label,
        f32[B,K,width]. Its attribute `read` has the names of the backbone features that it needs. It has the methods
        `layer_macs(tokens)`, `norm_macs(tokens)` and `attention(features)` -> f32[B,K,N].
      routing: a mapping with the keys of `config.model.head.routing`.
      entropy_weight: λ, 0.01 in every config.
      pooled: see DecoderHead.
    """

    by_label = uses_groups = True

    def __init__(
        self,
        decoder: nnx.Module,
        width: int,
        labels: int,
        routing: Mapping[str, Any],
        *,
        entropy_weight: float = 0.01,
        pooled: int = 0,
        dtype: Dtype = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(decoder, labels, pooled=pooled, rngs=rngs)
        self.entropy = routing["entropy"]
        self.entropy_weight = entropy_weight
        options = {"dtype": dtype, "rngs": rngs}
        self.experts = LabelExperts(width, labels, routing, **options)
        self.gates = Gates(width, labels, self.experts.entries, routing, **options)
        self.classifier = LabelClassifier(self.experts.out_width, labels, share=routing["classifier"], rngs=rngs)

    @classmethod
    def from_config(cls, config: ConfigDict, width: int, space: LabelSpace, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        prompts = config.model.prompts
        labels = len(space.names)
        settings, options = config.model.head.decoder, {"dtype": dtype, "rngs": rngs}
        named = options | {"names": space.name_vectors}
        if prompts_class(config).uses_groups:
            sizes = {"groups": prompts.num_groups, "per_group": prompts.per_group}
            decoder = GroupTokenDecoder(width, side_groups(prompts, space), settings, **sizes, **named)
        else:
            decoder = QueryDecoder(width, labels, settings, **named)
        pooled = pooled_channels(config, width)
        return cls(decoder, decoder.width, labels, config.model.head.routing, pooled=pooled, **options)

    @classmethod
    def gate_entries(cls, config: ConfigDict) -> dict[str, list[str]]:
        routing = config.model.head.routing
        counts = {"shared": routing.shared_experts, "task": routing.task_experts}
        return {"experts": [f"{kind} {e + 1}" for kind, count in counts.items() for e in range(count)]}

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        wrong = []
        routing = config.model.head.routing
        if not routing.shared_experts + routing.task_experts:
            wrong.append("model.head.routing.shared_experts and task_experts are both 0, and a label needs an expert")
        if config.model.head.decoder.queries:
            wrong.append("model.head.decoder.queries is for head query; routed_experts has one query per label")
        return wrong

    @classmethod
    def warnings(cls, config: ConfigDict) -> list[str]:
        routing = config.model.head.routing
        if routing.entropy == "paper":
            return [
                "model.head.routing.entropy=paper adds the entropy of the gates to the loss as printed in DR-MoE, "
                "which drives each gate to one expert, the opposite of its stated purpose; maximize raises the entropy"
            ]
        return []

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        label_features = partition.shard_labels(self.decoder(features, rngs=rngs))
        gates = self.gates(label_features)
        logits = self.with_linear_path(self.classifier(mix_experts(gates, self.experts(label_features))), features)
        penalties = {}
        if self.entropy != "off":
            penalty = entropy_penalty(gates, self.entropy, self.entropy_weight)
            penalties["entropy"] = jnp.broadcast_to(penalty, logits.shape[:1])
        return Prediction(logits, gates={"experts": gates}, penalties=penalties)

    def attention(self, features: Features) -> dict[str, jax.Array]:
        return {LABELS: self.decoder.attention(features)}
