"""The keys of `model.adapters`, which each adapter declares in its own file."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlmoe_jax.config.keys import Key, Number, Section, key_like
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapters.catalog import ADAPTERS
from mlmoe_jax.runtime.registry import suggestion

if TYPE_CHECKING:
    from mlmoe_jax.models.contracts import Setting

PLACE = "model.adapters"


def adapter_section(name: str) -> Section:
    """Return the keys of an adapter; UserError with the nearest name for an unknown one."""
    adapter = ADAPTERS[name]
    return Section(
        inspect.getdoc(adapter).partition("\n")[0], {leaf: _key(setting) for leaf, setting in adapter.settings.items()}
    )


def _key(setting: Setting) -> Key:
    key = dataclasses.replace(key_like(setting.default), doc=setting.doc)
    if isinstance(key, Number) and setting.least is not None:
        return dataclasses.replace(key, least=setting.least, most=setting.most)
    return key


def adapter_key(name: str) -> Key | None:
    """Return the key of a dotted name such as `model.adapters.lora.rank`; None if there is none."""
    adapter, _, leaf = name.removeprefix(f"{PLACE}.").partition(".")
    return adapter_section(adapter).entries.get(leaf) if adapter in ADAPTERS else None


def use_adapter(config: ConfigDict, name: str, **settings: Any) -> None:
    """Add an adapter to a config, with the defaults of its settings unless `settings` has other values.

    An adapter that the config already has keeps its other settings. Raises UserError for an unknown adapter or setting.
    """
    entries = adapter_section(name).entries
    if unknown := settings.keys() - entries.keys():
        raise UserError(f"{PLACE}.{name} has no {min(unknown)}{suggestion(min(unknown), entries)}")
    present = config.model.adapters.get(name, {})
    config.model.adapters[name] = ConfigDict(
        {leaf: key.default for leaf, key in entries.items()} | dict(present) | settings
    )


def why_unknown_adapter(name: str) -> str:
    """Return the end of an error about an unknown name below `model.adapters`."""
    adapter, _, leaf = name.removeprefix(f"{PLACE}.").partition(".")
    if adapter not in ADAPTERS:
        return f"does not exist{suggestion(adapter, ADAPTERS)}"
    entries = adapter_section(adapter).entries
    if not leaf:
        return f"is a section; set one of {', '.join(f'{PLACE}.{adapter}.{one}' for one in entries)}"
    return f"does not exist{suggestion(leaf, entries)}"


def missing_settings(config: ConfigDict) -> list[str]:
    """Return the settings that adapters of a config lack."""
    return [
        f"{PLACE}.{name}.{leaf}"
        for name, settings in config.model.adapters.items()
        if name in ADAPTERS
        for leaf in ADAPTERS[name].settings
        if leaf not in settings
    ]
