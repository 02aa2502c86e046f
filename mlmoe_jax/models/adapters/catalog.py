"""The adapters by name: a new adapter is a file and a line here. Does not import jax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlmoe_jax.runtime.registry import Registry

if TYPE_CHECKING:
    from mlmoe_jax.models.contracts import Adapter

# By the values of `config.model.prompts.kind`
PROMPTS: Registry[type[Adapter]] = Registry(
    "kind of prompts",
    {
        "none": "mlmoe_jax.models.adapters.prompts:NoPrompts",
        "deep": "mlmoe_jax.models.adapters.prompts:DeepPrompts",
        "shallow": "mlmoe_jax.models.adapters.prompts:ShallowPrompts",
        "e2vpt": "mlmoe_jax.models.adapters.e2vpt:PrunablePrompts",
        "group": "mlmoe_jax.models.adapters.groups:GroupPrompts",
    },
)

# By the names of the sections in `config.model.adapters`
ADAPTERS: Registry[type[Adapter]] = Registry(
    "adapter",
    {
        "lora": "mlmoe_jax.models.adapters.lora:LoRA",
    },
)


def prompts_of(config: ConfigDict) -> type[Adapter]:
    """Return the class of the prompts that a config names."""
    return PROMPTS[config.model.prompts.kind]


def adapters_of(config: ConfigDict) -> dict[str, tuple[type[Adapter], ConfigDict]]:
    """Return each adapter of a config that changes features by its name: its class and its settings."""
    chosen = {config.model.prompts.kind: (prompts_of(config), config.model.prompts)}
    chosen |= {name: (ADAPTERS[name], settings) for name, settings in config.model.adapters.items()}
    return {name: (adapter, settings) for name, (adapter, settings) in chosen.items() if adapter.changes_features}


def described(config: ConfigDict) -> str:
    """Return the adapters of a config in words, such as "deep prompts"; "" if there are none."""
    return " and ".join(adapter.describe(settings) for adapter, settings in adapters_of(config).values())
