"""The configuration: every key, loading, validation, published recipes; may use models and the packages below."""

from mlmoe_jax.config.defaults import default_config, flatten, portable, trusted, use_adapter
from mlmoe_jax.config.loading import (
    CONFIG_FOLDER,
    apply_overrides,
    config_options,
    from_json,
    load_config,
    option,
    parse_arg,
    set_key,
    split_references,
    to_json,
)
from mlmoe_jax.config.validation import find_unread, find_unused, find_warnings, require_changeable, validate

__all__ = [
    "CONFIG_FOLDER",
    "apply_overrides",
    "config_options",
    "default_config",
    "find_unread",
    "find_unused",
    "find_warnings",
    "flatten",
    "from_json",
    "load_config",
    "option",
    "parse_arg",
    "portable",
    "require_changeable",
    "set_key",
    "split_references",
    "to_json",
    "trusted",
    "use_adapter",
    "validate",
]
