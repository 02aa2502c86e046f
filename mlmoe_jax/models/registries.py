"""Heads, prompts, adapters and losses by name. A new entry is one line. This module does not import jax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlmoe_jax.runtime.registry import Registry

if TYPE_CHECKING:
    from mlmoe_jax.models.contracts import Adapter, Head
    from mlmoe_jax.models.losses import Loss

# By the values of `config.model.head.kind`
HEADS: Registry[type[Head]] = Registry(
    "head",
    {
        "linear": "mlmoe_jax.models.heads.linear:LinearHead",
        "cosine": "mlmoe_jax.models.heads.cosine:CosineHead",
        "group_experts": "mlmoe_jax.models.heads.group_experts:GroupExpertsHead",
        "group_linear": "mlmoe_jax.models.heads.group_experts:GroupLinearHead",
        "query": "mlmoe_jax.models.heads.query:QueryHead",
        "routed_experts": "mlmoe_jax.models.heads.dr_moe:RoutedExpertsHead",
        "ml_gcn": "mlmoe_jax.models.heads.gcn:MLGCNHead",
        "add_gcn": "mlmoe_jax.models.heads.gcn:ADDGCNHead",
        "csra": "mlmoe_jax.models.heads.csra:CSRAHead",
        "pat": "mlmoe_jax.models.heads.patching:PatchingHead",
        "cnn_rnn": "mlmoe_jax.models.heads.sequence:CNNRNNHead",
    },
)

# By the values of `config.model.prompts.kind`
PROMPT_KINDS: Registry[type[Adapter]] = Registry(
    "kind of prompts",
    {
        "none": "mlmoe_jax.models.adapters.prompts:NoPrompts",
        "deep": "mlmoe_jax.models.adapters.prompts:DeepPrompts",
        "shallow": "mlmoe_jax.models.adapters.prompts:ShallowPrompts",
        "e2vpt": "mlmoe_jax.models.adapters.prompts:PrunablePrompts",
        "group": "mlmoe_jax.models.adapters.group_prompts:GroupPrompts",
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

# By the values of `config.loss.kind`
LOSSES: Registry[type[Loss]] = Registry(
    "loss",
    {
        "asymmetric": "mlmoe_jax.models.losses:Asymmetric",
        "bce": "mlmoe_jax.models.losses:BinaryCrossEntropy",
        "focal": "mlmoe_jax.models.losses:Focal",
        "softmax": "mlmoe_jax.models.losses:Softmax",
        "hill": "mlmoe_jax.models.missing_labels:Hill",
        "focal_margin": "mlmoe_jax.models.missing_labels:FocalMargin",
        "splc": "mlmoe_jax.models.missing_labels:SPLC",
        "ll_r": "mlmoe_jax.models.missing_labels:LargeLossRejection",
        "ll_ct": "mlmoe_jax.models.missing_labels:LargeLossCorrection",
        "ll_cp": "mlmoe_jax.models.missing_labels:LargeLossPermanentCorrection",
        "an": "mlmoe_jax.models.missing_labels:AssumeNegative",
        "iu": "mlmoe_jax.models.missing_labels:IgnoreUnknown",
        "wan": "mlmoe_jax.models.missing_labels:WeakAssumeNegative",
        "an_ls": "mlmoe_jax.models.missing_labels:SmoothedAssumeNegative",
        "epr": "mlmoe_jax.models.missing_labels:ExpectedPositives",
        "role": "mlmoe_jax.models.missing_labels:ROLE",
        "distribution_balanced": "mlmoe_jax.models.missing_labels:DistributionBalanced",
        "csl": "mlmoe_jax.models.selective_loss:PartialAsymmetric",
    },
)


def head_class(config: ConfigDict) -> type[Head]:
    """Return the class of the head of a config."""
    return HEADS[config.model.head.kind]


def prompts_class(config: ConfigDict) -> type[Adapter]:
    """Return the class of the prompts of a config."""
    return PROMPT_KINDS[config.model.prompts.kind]


def active_adapters(config: ConfigDict) -> dict[str, tuple[type[Adapter], ConfigDict]]:
    """Return the adapters of a config that change features: name -> class and settings."""
    adapters = {config.model.prompts.kind: (prompts_class(config), config.model.prompts)}
    adapters |= {name: (ADAPTERS[name], settings) for name, settings in config.model.adapters.items()}
    return {name: (adapter, settings) for name, (adapter, settings) in adapters.items() if adapter.changes_features}


def describe_adapters(config: ConfigDict) -> str:
    """Return the adapters of a config in words, such as "deep prompts"; "" if there are none."""
    return " and ".join(adapter.describe(settings) for adapter, settings in active_adapters(config).values())
