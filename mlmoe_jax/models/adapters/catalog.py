"""All kinds of prompts and all adapters by name, with the config keys that each reads.

A new adapter is its file and its entry here. This module does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlmoe_jax.runtime.keys import (
    ChoiceKey,
    ChoicesKey,
    FlagKey,
    IntegerKey,
    NumberKey,
    PathKey,
    TextKey,
    TextsKey,
    keys_of,
    section,
)
from mlmoe_jax.runtime.registry import Registry, component

if TYPE_CHECKING:
    from mlmoe_jax.models.contracts import Adapter

# ------------------------------------------------------------------------------------------------------------- prompts
_COUNT = IntegerKey(30, "Prompts per block.", least=0, most=10_000)

# By the values of `config.model.prompts.kind`
PROMPT_KINDS: Registry[type[Adapter]] = Registry(
    "kind of prompts",
    {
        "none": "mlmoe_jax.models.adapters.prompts:NoPrompts",
        "deep": component("mlmoe_jax.models.adapters.prompts:DeepPrompts", count=_COUNT),
        "shallow": component(
            "mlmoe_jax.models.adapters.prompts:ShallowPrompts",
            count=_COUNT,
            gated=FlagKey(False, "A learned gate per block between a prompt before and after it (GateVPT)."),
            gate_init=NumberKey(10.0, "Gates start at sigmoid(−gate_init).", only_if={"gated": (True,)}),
            learn_temperature=FlagKey(False, "An attention temperature per block (GateVPT)."),
        ),
        "e2vpt": component(
            "mlmoe_jax.models.adapters.prompts:PrunablePrompts",
            count=_COUNT,
            key_values=IntegerKey(10, "Additional keys and values per block.", least=0, most=10_000),
            share_key_values=FlagKey(True, "One tensor for additional keys and values."),
            pruning=ChoiceKey(
                "none",
                "Masks over prompts and segments, of mlmoe prune.",
                choices={
                    "none": "no masks",
                    "learned": "trainable masks, to measure importance",
                    "fixed": "masks of kept_tokens and kept_segments",
                },
            ),
            kept_tokens=TextKey(
                "",
                "One of 1 (kept) and 0 (pruned) per prompt, such as 1101; if empty, all are kept.",
                only_if={"pruning": ("fixed",)},
            ),
            kept_segments=TextsKey(
                (),
                "One of 1 and 0 per segment, a text of 16 per prompt; if empty, all are kept.",
                only_if={"pruning": ("fixed",)},
            ),
            pruned=ChoiceKey(
                "absent",
                "What a pruned prompt is.",
                choices={"absent": "removed (paper)", "zeroed": "a zero vector that is attended to (code)"},
                only_if={"pruning": ("fixed",)},
            ),
        ),
        "group": component(
            "mlmoe_jax.models.adapters.group_prompts:GroupPrompts",
            sides=ChoiceKey(
                "both",
                "Which label groups have prompts.",
                choices={
                    "both": "co-occurrence (CO) and discriminative (DC)",
                    "co": "CO (VPT-CO)",
                    "dc": "DC (VPT-DC)",
                },
            ),
            num_groups=IntegerKey(5, "Label groups per side.", above=0, most=1_000),
            per_group=IntegerKey(3, "Prompts, and experts, per label group.", above=0, most=1_000),
            attention_mask=ChoiceKey(
                "all_prompts",
                "Which prompts a prompt attends to.",
                choices={"none": "all", "all_prompts": "itself only (code)", "cross_group": "its group (paper)"},
            ),
        ),
    },
)

PROMPT_KEYS = section(
    "Learned tokens that are added to the tokens of a frozen ViT.",
    kind=ChoiceKey(
        "none",
        "Prompts: deep is VPT-deep, one set per block; shallow is VPT-shallow and GateVPT, one set for all blocks; "
        "e2vpt adds keys and values to deep; group is ML-VPT's, deep prompts per label group and side.",
        choices=PROMPT_KINDS,
    ),
    project=IntegerKey(
        0,
        "Width of the prompts before a linear layer to the backbone's width; 0 is no layer.",
        least=0,
    ),
    dropout=NumberKey(0.0, "Dropout rate of the entries of prompts, drawn per image.", least=0, most=1),
    groups=PathKey(
        "computed",
        "Label groups: computed clusters the training labels, published takes the authors', anything else is a .json "
        'file {"co": [...], "dc": [...]}.',
        words=("computed", "published"),
    ),
    **keys_of(PROMPT_KINDS, "kind"),
)

# ------------------------------------------------------------------------------------------------------------ adapters
LINEAR_LAYERS = ("query", "key", "value", "output", "fc1", "fc2")  # of a block, as in ViTShape.layers
ALL = "all"
# Of all ViTs; `norm_pre` is the norm of CLIP before the first block.
TUNED_LAYERS = (
    *("patch_embed", "norm_pre", "norm1", "query", "key", "value", "output"),
    *("norm2", "fc1", "fc2", "norm"),
)

_LOW_RANK = {
    "rank": IntegerKey(8, "Rank of the update.", least=1, most=4_096),
    "alpha": NumberKey(8.0, "The update is multiplied by alpha / rank.", least=0),
    "rank_stabilized": FlagKey(False, "Multiply the update by alpha / √rank instead (rsLoRA)."),
    "targets": ChoicesKey(("query", "value"), "Updated layers.", choices=LINEAR_LAYERS),
    "dropout": NumberKey(0.0, "Dropout rate of the entries of an update's input.", least=0, most=1),
}
_TUNED = {"targets": ChoicesKey((ALL,), f"Tuned layers; {ALL} is all of them.", choices=(ALL, *TUNED_LAYERS))}

# By the names of the sections in `config.model.adapters`
ADAPTERS: Registry[type[Adapter]] = Registry(
    "adapter",
    {
        "lora": component(
            "mlmoe_jax.models.adapters.lora:LoRA",
            "LoRA: low-rank updates of the linear layers of a block.",
            **_LOW_RANK,
        ),
        "dora": component(
            "mlmoe_jax.models.adapters.lora:DoRA",
            "DoRA: a low-rank update of the direction of each column of a kernel, and a learned change of its length.",
            **_LOW_RANK,
        ),
        "bitfit": component(
            "mlmoe_jax.models.adapters.vectors:BitFit",
            "BitFit: tunes the biases of the linear layers and norms of the backbone.",
            **_TUNED,
        ),
        "ssf": component(
            "mlmoe_jax.models.adapters.vectors:SSF",
            "SSF: multiplies the outputs of the linear layers and norms by a learned scale, and adds a learned shift.",
            **_TUNED,
        ),
        "adaptformer": component(
            "mlmoe_jax.models.adapters.adaptformer:AdaptFormer",
            "AdaptFormer: a bottleneck beside the MLP of each block.",
            bottleneck=IntegerKey(64, "Width of the bottleneck.", least=1, most=4_096),
            scale=NumberKey(0.1, "The output of the bottleneck is multiplied by it."),
            dropout=NumberKey(0.1, "Dropout rate of the entries after the ReLU.", least=0, most=1),
            input=ChoiceKey(
                "normed",
                "What the bottleneck reads.",
                choices={"normed": "the normed tokens (paper)", "residual": "the tokens before the norm (code)"},
            ),
        ),
    },
)


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
