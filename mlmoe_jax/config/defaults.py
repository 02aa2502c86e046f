"""The table of all config keys, the keys of adapters, and the default config."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mlmoe_jax.config.keys import ConfigSection, IntegerKey, Key, RulesKey, TextKey, key_like, section, walk
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


def section_named(name: str) -> ConfigSection | None:
    """Return the section with a dotted name, or None if there is none. The empty name is the whole config.

    Sections of adapters, such as `model.adapters.lora`, are included.
    """
    parent, _, leaf = name.rpartition(".")
    if parent == ADAPTERS_SECTION and leaf in ADAPTERS:
        return adapter_section(leaf)
    return SECTIONS.get(name) if name else CONFIG


def key_named(name: str) -> Key | None:
    """Return the key with a dotted name, or None if there is none.

    Keys of adapters, and keys that may be added to a section (`ConfigSection.further`), are included.
    """
    parent, _, leaf = name.rpartition(".")
    section = section_named(parent)
    entry = section.entries.get(leaf, section.further) if section else None
    return entry if isinstance(entry, Key) else None


def default_config() -> ConfigDict:
    """Return a config with the default value of every key. Config files start from it."""
    return _section_defaults(CONFIG)


def _section_defaults(section: ConfigSection) -> ConfigDict:
    defaults = ConfigDict()
    for name, entry in section.entries.items():
        defaults[name] = entry.default if isinstance(entry, Key) else _section_defaults(entry)
    return defaults


def adapter_section(name: str) -> ConfigSection:
    """Return the config section of an adapter, with one key per setting.

    Raises:
      UserError: the adapter is unknown. The message suggests the nearest name.
    """
    adapter = ADAPTERS[name]
    doc = inspect.getdoc(adapter).partition("\n")[0]
    return ConfigSection(doc, {leaf: _adapter_key(setting) for leaf, setting in adapter.settings.items()})


def _adapter_key(setting: Setting) -> Key:
    key = key_like(setting.default)
    limits = {"least": setting.least, "most": setting.most}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return dataclasses.replace(key, doc=setting.doc, **given)


def use_adapter(config: ConfigDict, name: str, **settings: Any) -> None:
    """Add an adapter to a config.

    Args:
      config: the config, which is modified.
      name: name of the adapter.
      **settings: values of settings of the adapter. Other settings keep their value in the config. If they have none,
        they get their default.

    Raises:
      UserError: the adapter is unknown.
    """
    adapters = config.model.adapters
    defaults = {leaf: key.default for leaf, key in adapter_section(name).entries.items()}
    adapters[name] = ConfigDict(defaults | dict(adapters.get(name, {})) | settings)


def why_unknown(name: str) -> str:
    """Return the end of an error message about a dotted name that is not a key.

    It suggests the nearest name, or lists the names in the section.
    """
    if section := section_named(name):
        return f"is a section with {', '.join(section.entries)}; set one of them"
    parent, _, leaf = name.rpartition(".")
    section = section_named(parent)
    if section in (None, CONFIG):
        return f"does not exist{nearest(name, [*KEYS, *SECTIONS]) or suggestion(leaf, CONFIG.entries)}"
    return f"does not exist{suggestion(leaf, section.entries or ADAPTERS)}"  # the section of all adapters has no keys
