"""The table of all config keys, the keys of adapters, and the default config."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlmoe_jax.config.keys import ConfigSection, IntegerKey, Key, NumberKey, RulesKey, TextKey, key_like, section, walk
from mlmoe_jax.config.tables.data_keys import AUGMENT_KEYS, DATA_KEYS, PACK_KEYS
from mlmoe_jax.config.tables.evaluation_keys import (
    CALIBRATION_KEYS,
    EVAL_KEYS,
    LOG_KEYS,
    METRIC_KEYS,
    PRUNE_KEYS,
    REPORT_KEYS,
    SERVE_KEYS,
    THRESHOLD_KEYS,
)
from mlmoe_jax.config.tables.model_keys import MODEL_KEYS
from mlmoe_jax.config.tables.training_keys import (
    CHECKPOINT_KEYS,
    EMA_KEYS,
    LOSS_KEYS,
    MESH_KEYS,
    OPTIM_KEYS,
    TRAIN_KEYS,
)
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.registries import ADAPTERS
from mlmoe_jax.runtime.registry import nearest, suggestion

if TYPE_CHECKING:
    from mlmoe_jax.models.contracts import Setting

ADAPTERS_SECTION = "model.adapters"

CONFIG = section(
    "Everything that a run depends on.",
    seed=IntegerKey(
        0, "Seed of initial weights, image order, augmentation, dropout and label clustering.", least=0, most=2**32 - 1
    ),
    data=DATA_KEYS,
    augment=AUGMENT_KEYS,
    model=MODEL_KEYS,
    init_from=TextKey(
        "",
        "Start of the training: an official checkpoint (.pth, .npz, .safetensors), an adapter of PEFT or a run folder; "
        "if empty, the pretrained backbone.",
    ),
    trainable=RulesKey(
        ((r"^backbone/", False), (r"", True)), "Which parameters train, by parameter path; the first match counts."
    ),
    loss=LOSS_KEYS,
    optim=OPTIM_KEYS,
    ema=EMA_KEYS,
    train=TRAIN_KEYS,
    eval=EVAL_KEYS,
    metrics=METRIC_KEYS,
    thresholds=THRESHOLD_KEYS,
    calibration=CALIBRATION_KEYS,
    report=REPORT_KEYS,
    serve=SERVE_KEYS,
    log=LOG_KEYS,
    checkpoint=CHECKPOINT_KEYS,
    pack=PACK_KEYS,
    prune=PRUNE_KEYS,
    mesh=MESH_KEYS,
)

# Dotted name -> key, and dotted name -> section, of the whole table.
KEYS: dict[str, Key] = {name: entry for name, entry in walk(CONFIG) if isinstance(entry, Key)}
SECTIONS: dict[str, ConfigSection] = {name: entry for name, entry in walk(CONFIG) if isinstance(entry, ConfigSection)}


def key_named(name: str) -> Key | None:
    """Return the key of a dotted name, also a key of an adapter or of an open section; None if there is none."""
    if name in KEYS or name in SECTIONS:
        return KEYS.get(name)
    if name.startswith(f"{ADAPTERS_SECTION}."):
        adapter, leaf = _adapter_and_leaf(name)
        return adapter_section(adapter).entries.get(leaf) if adapter in ADAPTERS else None
    return SECTIONS[name.rpartition(".")[0]].further if in_open_section(name) else None


def in_open_section(name: str) -> bool:
    """Return whether a dotted name is directly below a section that allows other keys."""
    parent, _, leaf = name.rpartition(".")
    return bool(leaf) and parent in SECTIONS and SECTIONS[parent].further is not None


def default_config() -> ConfigDict:
    """Return a config with the default of every key. Config files change what they need."""
    return _section_defaults(CONFIG)


def _section_defaults(section: ConfigSection) -> ConfigDict:
    defaults = ConfigDict()
    for name, entry in section.entries.items():
        defaults[name] = entry.default if isinstance(entry, Key) else _section_defaults(entry)
    return defaults


def adapter_section(name: str) -> ConfigSection:
    """Return the keys of an adapter; UserError with the nearest name for an unknown one."""
    adapter = ADAPTERS[name]
    doc = inspect.getdoc(adapter).partition("\n")[0]
    return ConfigSection(doc, {leaf: _adapter_key(setting) for leaf, setting in adapter.settings.items()})


def _adapter_key(setting: Setting) -> Key:
    key = dataclasses.replace(key_like(setting.default), doc=setting.doc)
    if isinstance(key, NumberKey) and setting.least is not None:
        return dataclasses.replace(key, least=setting.least, most=setting.most)
    return key


def _adapter_and_leaf(name: str) -> tuple[str, str]:
    adapter, _, leaf = name.removeprefix(f"{ADAPTERS_SECTION}.").partition(".")
    return adapter, leaf


def use_adapter(config: ConfigDict, name: str, **settings: Any) -> None:
    """Add an adapter to a config.

    Args:
      config: the config, which changes.
      name: name of the adapter.
      **settings: values of its settings. All other settings keep their value in the config, or have their default.

    Raises:
      UserError: the adapter or a setting is unknown.
    """
    entries = adapter_section(name).entries
    if unknown := settings.keys() - entries.keys():
        raise UserError(f"{ADAPTERS_SECTION}.{name} has no {min(unknown)}{suggestion(min(unknown), entries)}")
    adapters = config.model.adapters
    defaults = {leaf: key.default for leaf, key in entries.items()}
    adapters[name] = ConfigDict(defaults | dict(adapters.get(name, {})) | settings)


def why_unknown(name: str) -> str:
    """Return the end of an error about an unknown key, with the nearest key."""
    if name in SECTIONS:
        return _one_of(name, SECTIONS[name])
    if name.startswith(f"{ADAPTERS_SECTION}."):
        return _why_unknown_adapter(name)
    parent = name.rpartition(".")[0]
    if parent in KEYS:
        return f"does not exist: '{parent}' is a key, not a section"
    return f"does not exist{_nearest_key(name) or _entries_around(name)}"


def _nearest_key(name: str) -> str:
    """Return the end of an error with the nearest key or section, or "".

    Keys with the same last part come first, also if only their initials are given, such as lr for learning_rate.
    """
    leaf = name.rpartition(".")[2]
    last_parts = {key: key.rpartition(".")[2] for key in KEYS}
    if likely := [key for key, last in last_parts.items() if leaf and leaf in (last, _initials(last))]:
        return nearest(name, likely, cutoff=0)
    sections = [section for section in SECTIONS if not name.startswith(f"{section}.")]
    return nearest(name, [*KEYS, *sections], cutoff=0.6)


def _initials(name: str) -> str:
    words = name.split("_")
    return "".join(word[0] for word in words) if len(words) > 1 else ""


def _entries_around(name: str) -> str:
    """Return the end of an error with the entries of the innermost section that exists."""
    while name:
        name = name.rpartition(".")[0]
        if name in SECTIONS:
            return f"; '{name}' has {', '.join(SECTIONS[name].entries)}"
    return f"; the config has {', '.join(CONFIG.entries)}"


def _one_of(name: str, section: ConfigSection) -> str:
    return f"is a section; set one of {', '.join(f'{name}.{leaf}' for leaf in section.entries)}"


def _why_unknown_adapter(name: str) -> str:
    adapter, leaf = _adapter_and_leaf(name)
    if adapter not in ADAPTERS:
        return f"does not exist{suggestion(adapter, ADAPTERS)}"
    section = adapter_section(adapter)
    return f"does not exist{suggestion(leaf, section.entries)}" if leaf else _one_of(name, section)
