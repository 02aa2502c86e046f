"""The table of all config keys, and the config with their defaults."""

from ml_collections import ConfigDict

from mlmoe_jax.config.adapters import PLACE, adapter_key
from mlmoe_jax.config.keys import Integer, Key, Rules, Section, Text, section, walk
from mlmoe_jax.config.tables.data import AUGMENT, DATA, PACK
from mlmoe_jax.config.tables.evaluation import EVAL, LOG, METRICS, PRUNE, REPORT, SERVE, THRESHOLDS
from mlmoe_jax.config.tables.model import MODEL
from mlmoe_jax.config.tables.training import CHECKPOINT, EMA, LOSS, MESH, OPTIM, TRAIN

CONFIG = section(
    "Everything that a run depends on.",
    seed=Integer(
        0,
        "Seed of initial weights, the order of images, augmentation, dropout and the clustering of labels.",
        least=0,
        most=2**32 - 1,
    ),
    data=DATA,
    augment=AUGMENT,
    model=MODEL,
    init_from=Text(
        "",
        "Where training starts: an official checkpoint (.pth, .npz or .safetensors) or the run folder of another run; "
        "if it is empty, the pretrained backbone and random values.",
    ),
    trainable=Rules(
        ((r"^backbone/", False), (r"", True)),
        "Which parameters train, by parameter path; the first match counts.",
    ),
    loss=LOSS,
    optim=OPTIM,
    ema=EMA,
    train=TRAIN,
    eval=EVAL,
    metrics=METRICS,
    thresholds=THRESHOLDS,
    report=REPORT,
    serve=SERVE,
    log=LOG,
    checkpoint=CHECKPOINT,
    pack=PACK,
    prune=PRUNE,
    mesh=MESH,
)

# Dotted name -> key, and dotted name -> section, of the whole table.
KEYS: dict[str, Key] = {name: entry for name, entry in walk(CONFIG) if isinstance(entry, Key)}
SECTIONS: dict[str, Section] = {name: entry for name, entry in walk(CONFIG) if isinstance(entry, Section)}


def key_named(name: str) -> Key | None:
    """Return the key of a dotted name, also of an adapter or in an open section; None if there is no such key."""
    if name in KEYS or name in SECTIONS:
        return KEYS.get(name)
    if name.startswith(f"{PLACE}."):
        return adapter_key(name)
    return SECTIONS[name.rpartition(".")[0]].further if in_open_section(name) else None


def in_open_section(name: str) -> bool:
    """Return whether a dotted name is directly below a section that allows further keys."""
    parent, _, leaf = name.rpartition(".")
    return bool(leaf) and parent in SECTIONS and SECTIONS[parent].further is not None


def default_config() -> ConfigDict:
    """Return a config with the default of every key; config files change what they need."""
    return _defaults(CONFIG)


def _defaults(table: Section) -> ConfigDict:
    return ConfigDict(
        {name: _defaults(one) if isinstance(one, Section) else one.default for name, one in table.entries.items()}
    )
