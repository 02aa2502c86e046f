"""Heads, prompts, adapters and losses by name. A new entry is one line. This module does not import jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlmoe_jax.runtime.registry import Registry

if TYPE_CHECKING:
    from jax import Array

    from mlmoe_jax.models.contracts import Adapter, Head

    Balance = Callable[[], Array] | None
    PerElement = Callable[[Array, Array], Array]
    LossBuilder = Callable[[Any, Balance], PerElement]

# By the values of `config.model.head.kind`
HEADS: Registry[type[Head]] = Registry(
    "head",
    {
        "linear": "mlmoe_jax.models.heads.linear:LinearHead",
        "group_experts": "mlmoe_jax.models.heads.group_experts:GroupExpertsHead",
        "group_linear": "mlmoe_jax.models.heads.group_experts:GroupLinearHead",
        "query": "mlmoe_jax.models.heads.query:QueryHead",
        "routed_experts": "mlmoe_jax.models.heads.routed_experts:RoutedExpertsHead",
        "ml_gcn": "mlmoe_jax.models.heads.graph:MLGCNHead",
        "add_gcn": "mlmoe_jax.models.heads.graph:ADDGCNHead",
        "cnn_rnn": "mlmoe_jax.models.heads.sequence:CNNRNNHead",
    },
)

# By the values of `config.model.prompts.kind`
PROMPTS: Registry[type[Adapter]] = Registry(
    "kind of prompts",
    {
        "none": "mlmoe_jax.models.adapters.prompts:NoPrompts",
        "deep": "mlmoe_jax.models.adapters.prompts:DeepPrompts",
        "shallow": "mlmoe_jax.models.adapters.prompts:ShallowPrompts",
        "e2vpt": "mlmoe_jax.models.adapters.prompts:PrunablePrompts",
        "group": "mlmoe_jax.models.adapters.groups:GroupPrompts",
    },
)

# By the names of the sections in `config.model.adapters`
ADAPTERS: Registry[type[Adapter]] = Registry(
    "adapter",
    {
        "lora": "mlmoe_jax.models.adapters.lora:LoRA",
        "dora": "mlmoe_jax.models.adapters.lora:DoRA",
        "bitfit": "mlmoe_jax.models.adapters.vectors:BitFit",
        "ssf": "mlmoe_jax.models.adapters.vectors:SSF",
        "adaptformer": "mlmoe_jax.models.adapters.adaptformer:AdaptFormer",
    },
)

# By the values of `config.loss.kind`. An entry is a builder `(settings, balance) -> per_element`. `settings` is
# `config.loss`. `balance()` returns the ratio of negatives to positives per label in training, f32[K]; it is None if no
# training labels are known. `per_element` maps logits and labels f32[B,K] to the loss per element, f32[B,K].
LOSSES: Registry[LossBuilder] = Registry(
    "loss",
    {
        "asymmetric": "mlmoe_jax.models.losses:build_asymmetric",
        "bce": "mlmoe_jax.models.losses:build_bce",
        "focal": "mlmoe_jax.models.losses:build_focal",
        "softmax": "mlmoe_jax.models.losses:build_softmax",
    },
)


def head_of(config: ConfigDict) -> type[Head]:
    """Return the class of the head of a config."""
    return HEADS[config.model.head.kind]


def prompts_of(config: ConfigDict) -> type[Adapter]:
    """Return the class of the prompts of a config."""
    return PROMPTS[config.model.prompts.kind]


def adapters_of(config: ConfigDict) -> dict[str, tuple[type[Adapter], ConfigDict]]:
    """Return the adapters of a config that change features: name -> class and settings."""
    adapters = {config.model.prompts.kind: (prompts_of(config), config.model.prompts)}
    adapters |= {name: (ADAPTERS[name], settings) for name, settings in config.model.adapters.items()}
    return {name: (adapter, settings) for name, (adapter, settings) in adapters.items() if adapter.changes_features}


def describe_adapters(config: ConfigDict) -> str:
    """Return the adapters of a config in words, such as "deep prompts"; "" if there are none."""
    return " and ".join(adapter.describe(settings) for adapter, settings in adapters_of(config).values())
