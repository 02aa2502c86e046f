"""The configuration: every key, loading, validation, published recipes; may use models and the rooms below."""

import importlib
from typing import TYPE_CHECKING, Any

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
from mlmoe_jax.config.validation import validate, warnings

if TYPE_CHECKING:
    from mlmoe_jax.config.recipes.benchmarks import use_dataset
    from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning, use_ml_vpt

# Further names for config files, imported on first use: the recipes import models, which import jax.
_LAZY = {
    "prompt_tuning": "mlmoe_jax.config.recipes.prompt_tuning",
    "use_dataset": "mlmoe_jax.config.recipes.benchmarks",
    "use_ml_vpt": "mlmoe_jax.config.recipes.prompt_tuning",
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
    "use_dataset",
    "use_ml_vpt",
    "validate",
    "warnings",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
