"""The table of all config keys: its sections, each declared beside the part of the program that reads it.

The declarations, in `*_keys.py` and `catalog.py`, import neither jax nor the parts that compute.
"""

from __future__ import annotations

from mlmoe_jax.runtime.keys import ConfigSection, IntegerKey, Key, PathKey, RulesKey, resolve, section, walk
from mlmoe_jax.runtime.registry import Registry

ADAPTERS_SECTION = "model.adapters"

# The sections of the config, in the order of the help. A new one is the file that declares it and its line here.
DECLARED: Registry[ConfigSection] = Registry(
    "config section",
    {
        "data": "mlmoe_jax.data.data_keys:DATA_KEYS",
        "augment": "mlmoe_jax.data.data_keys:AUGMENT_KEYS",
        "model": "mlmoe_jax.models.model_keys:MODEL_KEYS",
        "loss": "mlmoe_jax.models.loss_catalog:LOSS_KEYS",
        "optim": "mlmoe_jax.training.training_keys:OPTIM_KEYS",
        "ema": "mlmoe_jax.training.training_keys:EMA_KEYS",
        "train": "mlmoe_jax.training.training_keys:TRAIN_KEYS",
        "eval": "mlmoe_jax.evaluation.evaluation_keys:EVAL_KEYS",
        "metrics": "mlmoe_jax.evaluation.evaluation_keys:METRIC_KEYS",
        "thresholds": "mlmoe_jax.evaluation.evaluation_keys:THRESHOLD_KEYS",
        "calibration": "mlmoe_jax.evaluation.evaluation_keys:CALIBRATION_KEYS",
        "report": "mlmoe_jax.apps.report.report_keys:REPORT_KEYS",
        "serve": "mlmoe_jax.apps.serving.serve_keys:SERVE_KEYS",
        "log": "mlmoe_jax.runs.tracker_keys:LOG_KEYS",
        "checkpoint": "mlmoe_jax.training.training_keys:CHECKPOINT_KEYS",
        "pack": "mlmoe_jax.apps.tools.tool_keys:PACK_KEYS",
        "prune": "mlmoe_jax.apps.tools.tool_keys:PRUNE_KEYS",
        "mesh": "mlmoe_jax.training.training_keys:MESH_KEYS",
    },
)

_WHOLE = section(
    "Everything that a run depends on.",
    stages=("model", "train"),
    on_resume="fixed",
    shared="record",
    seed=IntegerKey(
        0,
        "Seed of initial weights, image order, augmentation, dropout and label clustering.",
        least=0,
        most=2**32 - 1,
        stages=("train",),
    ),
    init_from=PathKey(
        "",
        "Start of the training: an official checkpoint (.pth, .npz, .safetensors), an adapter of PEFT or a run folder; "
        "if empty, the pretrained backbone.",
        on_resume="at_start",
    ),
    trainable=RulesKey(
        ((r"^backbone/", False), (r"", True)), "Which parameters train, by parameter path; the first match counts."
    ),
    **{name: DECLARED[name] for name in DECLARED},
)

CONFIG: ConfigSection = resolve(_WHOLE, "", _WHOLE)

# Dotted name -> key, and dotted name -> section, of the whole table.
KEYS: dict[str, Key] = {name: entry for name, entry in walk(CONFIG) if isinstance(entry, Key)}
SECTIONS: dict[str, ConfigSection] = {name: entry for name, entry in walk(CONFIG) if isinstance(entry, ConfigSection)}

REQUIRED = tuple(name for name, key in KEYS.items() if key.required)  # in every stored config


def section_named(name: str) -> ConfigSection | None:
    """Return the section with a dotted name, or None if there is none. The empty name is the whole config."""
    return SECTIONS.get(name) if name else CONFIG


def key_named(name: str) -> Key | None:
    """Return the key with a dotted name; None if there is none.

    In a section that accepts additional keys (`ConfigSection.further`), every name is a key.
    """
    parent, _, leaf = name.rpartition(".")
    section = section_named(parent)
    entry = section.entries.get(leaf, section.further) if section else None
    return entry if isinstance(entry, Key) else None


def entry_named(name: str) -> Key | ConfigSection | None:
    """Return the key or the section with a dotted name, or None if there is none."""
    return key_named(name) or section_named(name)


def keys_read(stage: str) -> list[str]:
    """Return the dotted names of the keys that a stage (a name in `runtime.stages.STAGES`) reads, in table order."""
    return [name for name, key in KEYS.items() if stage in key.stages]
