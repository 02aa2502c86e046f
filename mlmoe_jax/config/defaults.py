"""The default config, and how adapters are added to a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config.table import ADAPTERS_SECTION, CONFIG, KEYS, SECTIONS, key_named, section_named
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.keys import ConfigSection, Key
from mlmoe_jax.runtime.registry import nearest, suggestion


def default_config() -> ConfigDict:
    """Return a config with the default value of every key. Config files start from it."""
    return _section_defaults(CONFIG)


def _section_defaults(section: ConfigSection) -> ConfigDict:
    defaults = ConfigDict()
    for name, entry in section.entries.items():
        if isinstance(entry, Key):
            defaults[name] = entry.default
        elif not entry.optional:
            defaults[name] = _section_defaults(entry)
    return defaults


def use_adapter(config: ConfigDict, name: str, **settings: Any) -> None:
    """Add an adapter to a config, in place, or change the settings of an adapter that the config has.

    Settings that are not given keep the value that they have in the config. If they have none, they get their default.
    Raises UserError, which suggests the nearest name, if no adapter is called `name`.
    """
    known = SECTIONS[ADAPTERS_SECTION].entries
    if name not in known:
        raise UserError(f"there is no adapter '{name}'{suggestion(name, known)}")
    adapters = config.model.adapters
    adapters[name] = ConfigDict(dict(_section_defaults(known[name])) | dict(adapters.get(name, {})) | settings)


def portable(config: ConfigDict) -> ConfigDict:
    """Return a copy of a config for a shared model, see `Key.portable`."""
    return _convert(config, lambda key, value: key.portable(value))


def trusted(config: ConfigDict) -> ConfigDict:
    """Return a copy of the config of a shared model with what such a model decides, see `Key.trusted`."""
    return _convert(config, lambda key, value: key.trusted(value))


def _convert(config: ConfigDict, convert: Callable[[Key, Any], Any]) -> ConfigDict:
    """Return a copy of a config in which each value is `convert` of its key and its value."""
    converted = config.copy_and_resolve_references()
    values = flatten(config).items()
    converted.update_from_flattened_dict({name: convert(key_named(name), value) for name, value in values})
    return converted


def flatten(config: ConfigDict | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of all sections in one dict, dotted key -> value, such as {"a.b": 1} for {"a": {"b": 1}}."""
    flat = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, ConfigDict | dict) else {name: value}
    return flat


def why_unknown(name: str) -> str:
    """Return the end of an error message that says why `name`, a dotted name, is not a key.

    If `name` is a section, the text lists the entries of the section. Otherwise it suggests the nearest name.
    """
    if section := section_named(name):
        return f"is a section with {', '.join(section.entries)}; set one of them"
    parent, _, leaf = name.rpartition(".")
    section = section_named(parent)
    if section in (None, CONFIG):
        return f"does not exist{nearest(name, [*KEYS, *SECTIONS]) or suggestion(leaf, CONFIG.entries)}"
    return f"does not exist{suggestion(leaf, section.entries)}"
