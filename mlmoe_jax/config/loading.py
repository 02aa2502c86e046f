"""Configs from files, from the command line and from run folders; `defaults.py` has the keys and their meaning.

A config file defines `get_config(arg="") -> ConfigDict`, starting from `default_config()`. It receives the text after
the colon in `--config=file.py:dataset=digits,epochs=3`, which `parse_arg` splits. A file that chooses by what the
machine has defines `get_config(arg="", run=None)`: run is the config of the run that is resumed, or None, so that a
run keeps its choice.
"""

import difflib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config.adapters import PLACE, use_adapter, why_unknown_adapter
from mlmoe_jax.config.defaults import CONFIG, KEYS, SECTIONS, default_config, key_named
from mlmoe_jax.config.keys import Key, key_like, tuples
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.registry import suggestion

_PACKAGE = Path(__file__).resolve().parents[1]


# An installed package contains the configs; a checkout has them next to the package.
CONFIG_FOLDER = next((f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if f.is_dir()), _PACKAGE)

# Keys of earlier versions that are constants now: key -> the value that stayed. A stored config may still have them.
CONSTANT: dict[str, Any] = {
    "compile.cache": 1.0,
    "prune.keep_segments": 4,
    "augment.crop_ratio": (0.75, 1.3333333333333333),
    "augment.where": "host",
    "optim.eps": 1e-8,
    "optim.milestone_factor": 0.1,
    "serve.queue": 128,
    "serve.seconds": 30.0,
    "serve.wait": 0.005,
    "thresholds.least_positives": 10,
    "train.divergence_limit": 1000.0,
    "train.find_nonfinite": False,
    "metrics.calibration_bins": 15,
    "metrics.pair_images": 10,
    "metrics.pair_level": 0.4,
    "metrics.pair_support": 20,
    "metrics.top_k_minimum": 0.5,
    "report.sample_side": 224,
    "model.prompts.segments": 16,
    "model.prompts.tau_co": 2.0,
    "model.prompts.tau_dc": 3.0,
    "model.head.graph.share": 0.2,
    "model.head.graph.threshold": 0.4,
    "model.head.routing.spread": "compiler",
    "model.head.sequence.beam_width": 4,
    "model.head.sequence.dropout": 0.5,
    "pack.processes": 0,
    "pack.quality": 95,
    "pack.shard_images": 1024,
}
# The keys that `model.head.decoder.style` has replaced, and their values for each style.
_STYLE = "model.head.decoder.style"
_STYLE_KEYS = (
    *("self_attention", "query_role", "fixed_queries", "positions", "pre_norm"),
    *("decoder_norm", "activation", "project", "init"),
)
_STYLES = {
    ("all", "input", False, "once", False, True, "relu", "auto", "xavier"): "dr_moe",
    ("none", "input", False, "once", False, True, "relu", "auto", "xavier"): "independent",
    ("none", "added", False, "detr", False, True, "relu", "auto", "xavier"): "q2l",
    ("identity", "input", True, "none", False, False, "relu", "linear_relu", "torch"): "ml_decoder",
}
# Sections whose keys do not change a trained model, so that a stored value other than the constant is only reported.
_HARMLESS = (
    "data",
    "augment",
    "eval",
    "thresholds",
    "model.prompts.tau_co",  # a run has its label groups
    "model.prompts.tau_dc",
    "train.divergence_limit",
    "train.find_nonfinite",
    "metrics",
    "report",
    "serve",
    "mesh",
    "compile",
    "pack",
    "prune",
    "checkpoint",
    "log",
)

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def parse_arg(arg: str, **defaults: Any) -> ConfigDict:
    """Split `key=value,key=value`; `defaults` has the known keys, and their types by their values.

    Raises UserError for an unknown or repeated key, and for a value of another type.
    """
    options = ConfigDict(defaults)
    takes = f"this config takes {', '.join(defaults) or 'no arguments'}"
    seen: set[str] = set()
    for item in _arguments(arg, defaults):
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"'{item}' after the config's colon is not key=value; {takes}")
        if key in seen:
            raise UserError(f"config argument '{key}' is given twice")
        seen.add(key)
        if key not in defaults:
            close = difflib.get_close_matches(key, defaults, n=1)
            hint = f"did you mean '{close[0]}'?" if close else takes
            raise UserError(f"config argument '{key}' does not exist; {hint}")
        options[key] = _read(key_like(defaults[key]), text, f"config argument '{key}'")
    return options


def _arguments(arg: str, defaults: dict[str, Any]) -> list[str]:
    """Split at commas; a part without "=" belongs to the argument before it if this is a tuple, as in `a=1,b=x,y`."""
    items: list[str] = []
    for part in filter(None, arg.split(",")):
        if "=" not in part and items and isinstance(defaults.get(items[-1].partition("=")[0]), tuple):
            items[-1] += f",{part}"
        else:
            items.append(part)
    return items


def load_config(
    reference: str, overrides: list[tuple[str, str]], *, run: Callable[[], ConfigDict | None] = lambda: None
) -> ConfigDict:
    """Load `path.py:arg` or a bare name in configs/, and apply `overrides` ("a.b", "text").

    run: returns the config of the run that is resumed, or None; called only for files whose choice depends on it.
    Raises UserError for a missing file, an unknown key, and a value of another type.
    """
    location, _, arg = reference.partition(":")
    path = find_config(location)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"config {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"config {path} is not valid Python: line {error.lineno}, {error.msg}") from error
    if not hasattr(module, "get_config"):
        raise UserError(f"config {path} defines no get_config(arg) function")
    further = {"run": run()} if "run" in inspect.signature(module.get_config).parameters else {}
    return apply_overrides(module.get_config(arg, **further), overrides)


def split_references(text: str) -> list[str]:
    """Split `a,b:x=1,y=2,c` into the configs `a`, `b:x=1,y=2` and `c`.

    An item with "=" and without ":" is a further argument of the config before it.
    """
    references: list[str] = []
    for part in text.split(","):
        if references and "=" in part and ":" not in part.partition("=")[0]:
            references[-1] += f",{part}"
        elif part:
            references.append(part)
    return references


def find_config(location: str) -> Path:
    """Return the file of a config by its path, or by its name in configs/; UserError if there is none."""
    candidates = [Path(location), Path(f"{location}.py"), CONFIG_FOLDER / location, CONFIG_FOLDER / f"{location}.py"]
    for candidate in candidates:
        if os.path.isfile(candidate):  # False also for a name that no file can have
            return candidate
    names = sorted(path.stem for path in CONFIG_FOLDER.glob("*.py"))
    raise UserError(f"there is no config '{location}'{suggestion(Path(location).stem, names)}")


def as_pairs(overrides: Overrides | None) -> list[tuple[str, str]]:
    """Return overrides as pairs (dotted key, text); UserError for the value None and for a whole section."""
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    return [(key, _text(key, value)) for key, value in pairs]


def _text(key: str, value: Any) -> str:
    if value is None or isinstance(value, Mapping):
        raise UserError(f"config key '{key}' cannot be set to {value!r}; give a value, or one key for each value")
    return repr(tuple(value)) if isinstance(value, list | tuple) else str(value)


def apply_overrides(config: ConfigDict, overrides: list[tuple[str, str]]) -> ConfigDict:
    """Set ("a.b", "text") pairs, with each text read by its key; UserError as in `set_key`, or for a repeated key."""
    seen: set[str] = set()
    for key, text in overrides:
        if key in seen:
            raise UserError(f"--config.{key} is given twice")
        seen.add(key)
        set_key(config, key, text, what="config key")
    return config


def set_key(config: ConfigDict, key: str, text: str, *, what: str) -> None:
    """Set the dotted `key` of a whole config to the value that `text` stands for.

    what: the role of the key in an error, such as "config key". Raises UserError for an unknown key, with the nearest
    key of the whole config, and for a text that the key cannot read.
    """
    if key == PLACE:
        for name in filter(None, text.split(",")):
            use_adapter(config, name)
        return
    if key in SECTIONS:
        inside = ", ".join(f"{key}.{name}" for name in SECTIONS[key].entries)
        raise UserError(f"{what} '{key}' is a section; set one of {inside}")
    declared = key_named(key)
    if declared is None:
        raise UserError(f"{what} '{key}' {why_unknown(key)}")
    _assign(config, key, _read(declared, text, f"{what} '{key}'"))


def _assign(config: ConfigDict, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    if key.startswith(f"{PLACE}."):
        use_adapter(config, parents[-1])
    node = config
    for name in parents:
        node = node[name]
    node[leaf] = value


def _read(key: Key, text: str, what: str) -> Any:
    try:
        return key.read(text)
    except (ValueError, KeyError, SyntaxError, TypeError, MemoryError, RecursionError) as error:  # of ast.literal_eval
        example = key.text_of(key.default)
        such = f" such as {example}" if example else ""
        raise UserError(f"{what} takes {key.takes}{such}, not '{text}'") from error


def why_unknown(name: str) -> str:
    """Return the end of an error about an unknown key `name`, with the nearest known key."""
    if name in CONSTANT:
        return f"is no longer a key: its value is always {CONSTANT[name]!r}"
    if name.startswith(f"{PLACE}."):
        return why_unknown_adapter(name)
    if (place := name.rpartition(".")[0]) in KEYS:
        return f"does not exist: '{place}' is a key, not a section"
    # A key with the same last part in another section is nearer than another key of the same section.
    leaf = name.rpartition(".")[2]
    same = [known for known in KEYS if known.rpartition(".")[2] == leaf]
    known = [*KEYS, *(section for section in SECTIONS if not name.startswith(f"{section}."))]
    close = difflib.get_close_matches(name, same or known, n=1, cutoff=0 if same else 0.6)
    if close:
        return f"does not exist; did you mean '{close[0]}'?"
    while place not in SECTIONS and place:
        place = place.rpartition(".")[0]
    if place:
        return f"does not exist; '{place}' has {', '.join(SECTIONS[place].entries)}"
    return f"does not exist; the config has {', '.join(CONFIG.entries)}"


def to_json(config: ConfigDict) -> str:
    """Return the config as JSON text; `from_json` returns the same config."""
    return json.dumps(config.to_dict(), indent=2)


def from_json(text: str, source: str = "the stored config") -> ConfigDict:
    """Read a stored config over the defaults, so that keys added later have their default.

    Unknown keys, such as those of a later version, are ignored with a warning.

    Args:
      text: the JSON text.
      source: its name in messages.

    Raises:
      UserError: a value of another type, with its key; or damaged JSON.
    """
    with damage_explained(source):
        stored = _with_style(_without_constants(flatten(json.loads(text)), source), source)
    if stored.get("data.cache") == "ram":
        stored["data.cache"] = "disk"  # the cache of images that is left
    # Terms of weight 0 that no head gives had no effect, and were accepted once.
    stored = {name: v for name, v in stored.items() if v or not name.startswith("loss.terms.") or name in KEYS}
    config, unknown = default_config(), []
    for name, value in stored.items():
        if name in SECTIONS:
            raise UserError(f"{source} is damaged: '{name}' is a section, not a key")
        if (key := key_named(name)) is None:
            unknown.append(name)
            continue
        try:
            _assign(config, name, tuples(value))
        except TypeError as error:
            must = f"'{name}' is {value!r} and must be {key.takes}"
            raise UserError(f"{source} is damaged: its key {must}") from error
    if unknown:
        status(f"warning: {source} has unknown keys, which are ignored: {', '.join(unknown)}")
    return config


def _without_constants(stored: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a stored config without the keys of CONSTANT.

    Another value than the constant is reported; raises UserError if the trained model depends on it.
    """
    for name, value in stored.items():
        if name not in CONSTANT or tuples(value) == CONSTANT[name]:
            continue
        differs = f"{source} has {name}={value!r}, which is always {CONSTANT[name]!r} in this version"
        if not {name, name.partition(".")[0]} & set(_HARMLESS):
            raise UserError(f"{differs}; use the version that trained the run")
        status(f"warning: {differs}")
    return {name: value for name, value in stored.items() if name not in CONSTANT}


def _with_style(stored: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a stored config with `model.head.decoder.style` in place of the keys of which it was composed.

    Raises UserError for a combination that is none of the styles, if the head has a decoder.
    """
    names = [f"model.head.decoder.{name}" for name in _STYLE_KEYS]
    first = dict(zip(names, next(iter(_STYLES)), strict=True))
    if not first.keys() & stored.keys():
        return stored
    values = tuple(stored.get(name, first[name]) for name in names)
    style = next((style for earlier, style in _STYLES.items() if earlier == values), "")
    if not style and stored.get("model.head.kind") in ("query", "routed_experts"):
        raise UserError(
            f"{source} has a query decoder ({', '.join(map(str, values))}) that is none of the styles of this version, "
            f"{', '.join(_STYLES.values())}; use the version that trained the run"
        )
    rest = {name: value for name, value in stored.items() if name not in first}
    return rest | {_STYLE: style or "dr_moe"}


def flatten(config: ConfigDict | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"a.b": value} over all sections."""
    flat = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, ConfigDict | dict) else {name: value}
    return flat
