"""The heads by the values of `config.model.head.kind`: a new head is a file and a line here. Does not import jax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlmoe_jax.runtime.registry import Registry

if TYPE_CHECKING:
    from mlmoe_jax.models.contracts import Head

HEADS: Registry[type[Head]] = Registry(
    "head",
    {
        "linear": "mlmoe_jax.models.heads.linear:LinearHead",
        "group_experts": "mlmoe_jax.models.heads.group_experts:GroupExpertsHead",
        "group_linear": "mlmoe_jax.models.heads.group_linear:GroupLinearHead",
        "query": "mlmoe_jax.models.heads.query:QueryHead",
        "routed_experts": "mlmoe_jax.models.heads.routed_experts:RoutedExpertsHead",
        "ml_gcn": "mlmoe_jax.models.heads.graph:MLGCNHead",
        "add_gcn": "mlmoe_jax.models.heads.graph:ADDGCNHead",
        "cnn_rnn": "mlmoe_jax.models.heads.sequence:CNNRNNHead",
    },
)


def head_of(config: ConfigDict) -> type[Head]:
    """Return the class of the head that a config names."""
    return HEADS[config.model.head.kind]
