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
    return _defaults(CONFIG)


def _defaults(table: ConfigSection) -> ConfigDict:
    return ConfigDict(
        {name: _defaults(one) if isinstance(one, ConfigSection) else one.default for name, one in table.entries.items()}
    )


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
    present = config.model.adapters.get(name, {})
    config.model.adapters[name] = ConfigDict(
        {leaf: key.default for leaf, key in entries.items()} | dict(present) | settings
    )


def why_unknown(name: str) -> str:
    """Return the end of an error about an unknown key, with the nearest key."""
    if name in SECTIONS:
        return f"is a section; set one of {', '.join(f'{name}.{one}' for one in SECTIONS[name].entries)}"
    if name.startswith(f"{ADAPTERS_SECTION}."):
        return _why_unknown_adapter(name)
    if (place := name.rpartition(".")[0]) in KEYS:
        return f"does not exist: '{place}' is a key, not a section"
    # A key with this last part or these initials is nearer than other keys of the section.
    leaf = name.rpartition(".")[2]
    lasts = {key: key.rpartition(".")[2] for key in KEYS}
    likely = [key for key, last in lasts.items() if last == leaf or ("_" in last and _initials(last) == leaf)]
    known = [*KEYS, *(section for section in SECTIONS if not name.startswith(f"{section}."))]
    if close := nearest(name, likely or known, cutoff=0 if likely else 0.6):
        return f"does not exist{close}"
    while place not in SECTIONS and place:
        place = place.rpartition(".")[0]
    if place:
        return f"does not exist; '{place}' has {', '.join(SECTIONS[place].entries)}"
    return f"does not exist; the config has {', '.join(CONFIG.entries)}"


def _initials(name: str) -> str:
    """Return the initials of a name: lr for learning_rate."""
    return "".join(word[:1] for word in name.split("_"))


def _why_unknown_adapter(name: str) -> str:
    adapter, leaf = _adapter_and_leaf(name)
    if adapter not in ADAPTERS:
        return f"does not exist{suggestion(adapter, ADAPTERS)}"
    entries = adapter_section(adapter).entries
    if not leaf:
        return f"is a section; set one of {', '.join(f'{ADAPTERS_SECTION}.{adapter}.{one}' for one in entries)}"
    return f"does not exist{suggestion(leaf, entries)}"
