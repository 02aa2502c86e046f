"""The configuration: every key, loading, validation, published recipes; may use models and the rooms below."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlmoe_jax.config.adapters import use_adapter
    from mlmoe_jax.config.defaults import default_config
    from mlmoe_jax.config.loading import (
        CONFIG_FOLDER,
        apply_overrides,
        flatten,
        from_json,
        load_config,
        parse_arg,
        set_key,
        split_references,
        to_json,
    )
    from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning, use_ml_vpt
    from mlmoe_jax.config.recipes.shared import use_dataset
    from mlmoe_jax.config.validation import validate, warnings

# Where the names are. Each is imported on first use, so that --help imports none of them; the recipes import models,
# which import jax.
_LAZY = {
    "default_config": "defaults",
    "use_adapter": "adapters",
    **dict.fromkeys(("CONFIG_FOLDER", "apply_overrides", "flatten", "from_json", "load_config"), "loading"),
    **dict.fromkeys(("parse_arg", "set_key", "split_references", "to_json"), "loading"),
    **dict.fromkeys(("prompt_tuning", "use_ml_vpt"), "recipes.prompt_tuning"),
    "use_dataset": "recipes.shared",
    **dict.fromkeys(("validate", "warnings"), "validation"),
}

__all__ = [
    "CONFIG_FOLDER",
    "apply_overrides",
    "default_config",
    "flatten",
    "from_json",
    "load_config",
    "parse_arg",
    "prompt_tuning",
    "set_key",
    "split_references",
    "to_json",
    "use_adapter",
    "use_dataset",
    "use_ml_vpt",
    "validate",
    "warnings",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
