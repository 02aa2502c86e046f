"""Configs from files, from the command line and from run folders. `table.py` has the keys.

A config file defines `get_config(arg="") -> ConfigDict`, which starts from `default_config()`. `arg` is the text after
the colon in `--config=file.py:dataset=digits,epochs=3`; `parse_arg` splits it, and `--help=config:file.py` lists the
options that it declares. A file whose values depend on the machine defines `get_config(arg="", run=None)`. `run` is the
config of the resumed run, or None, so that a resumed run keeps its values.
"""

import inspect
import json
import logging
import os
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config.defaults import default_config, flatten, use_adapter, why_unknown
from mlmoe_jax.config.table import ADAPTERS_SECTION, KEYS, SECTIONS, key_named
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.keys import Key, KeyValues, TextsKey, key_like, to_tuples
from mlmoe_jax.runtime.registry import nearest, suggestion
from mlmoe_jax.runtime.text import printable

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed package contains the configs; a checkout has them next to the package.
CONFIG_FOLDER = next((f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if f.is_dir()), _PACKAGE)

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


class UnknownOption(UserError):
    """An error: the argument of a config names an unknown option. `options` maps the known options to their keys."""

    def __init__(self, message: str, options: Mapping[str, Key]):
        super().__init__(message)
        self.options = options


def parse_arg(arg: str, **declared: Any) -> ConfigDict:
    """Return all declared options of a config, option -> value, parsed from `key=value,key=value`.

    Items of a list are separated by `+`.

    Args:
      **declared: option -> its key, such as a result of `option`, or its default value. The type of a default is the
        type of the option, and `--help` has no sentence about it.

    Raises:
      UnknownOption: an option is unknown.
      UserError: an option is repeated, or a value is not allowed.
    """
    keys = {name: key if isinstance(key, Key) else key_like(key) for name, key in declared.items()}
    keys |= {name: replace(key, separator="+") for name, key in keys.items() if isinstance(key, TextsKey)}
    options = ConfigDict({name: key.default for name, key in keys.items()})
    for name, text in _split_options(arg, keys):
        role = f"config argument '{name}'"
        value = _parse(keys[name], text, role)
        if not keys[name].allows(value):
            raise UserError(f"{role} is '{text}' and must be {keys[name].allowed}{keys[name].hint(value)}")
        options[name] = value
    return options


def option(name: str, **changes: Any) -> Key:
    """Return an option for `parse_arg` that sets a key of the config.

    It is a copy of the key with the dotted name `name`. `changes` are new values of its fields, such as `default` or
    `doc`. `only_if` is empty: the option may be given with any other settings.
    """
    return replace(KEYS[name], only_if={}, **changes)


def _split_options(arg: str, keys: Mapping[str, Key]) -> Iterator[tuple[str, str]]:
    """Yield (name, text of the value) for each option in `arg`.

    Raises UnknownOption if an option is not in `keys`, and UserError if an option is repeated.
    """
    seen = set()
    all_options = f"this config takes {', '.join(keys) or 'no arguments'}"
    for item in filter(None, arg.split(",")):
        name, equals, text = item.partition("=")
        if not equals:
            raise UnknownOption(f"'{item}' after the config's colon is not key=value; {all_options}", keys)
        if name not in keys:
            hint = nearest(name, keys) or f"; {all_options}"
            raise UnknownOption(f"config argument '{name}' does not exist{hint}", keys)
        if name in seen:
            raise UserError(f"config argument '{name}' is given twice")
        seen.add(name)
        yield name, text


def load_config(
    reference: str, overrides: KeyValues, *, run: Callable[[], ConfigDict | None] = lambda: None
) -> ConfigDict:
    """Return the config of a config file, with overrides applied.

    Args:
      reference: the path of a file, or the name of a file in configs/. The argument of its `get_config` may follow
        after a colon, as in `path.py:arg`.
      overrides: pairs (dotted key, text of the value).
      run: returns the config of the resumed run, or None. It is called only if the `get_config` of the file has a
        parameter `run`.

    Raises:
      UserError: the file is missing, a key is unknown, or a value has a wrong type.
    """
    location, _, arg = reference.partition(":")
    get_config, _ = _open_config(location)
    further = {"run": run()} if "run" in inspect.signature(get_config).parameters else {}
    try:
        config = get_config(arg, **further)
    except UnknownOption as error:
        message = str(error).removesuffix("?")
        raise UnknownOption(f"{message}; see mlmoe --help=config:{location}", error.options) from error
    return apply_overrides(config, overrides)


def config_options(location: str) -> tuple[str, Mapping[str, Key]]:
    """Return the docstring and the options, name -> key, of a config file: a path, or a name in configs/.

    Raises UserError if the file is missing or no config.
    """
    get_config, doc = _open_config(location)
    try:
        get_config("help")  # which is no option, since it has no value
    except UnknownOption as error:
        return doc, error.options
    return doc, {}


def _open_config(location: str) -> tuple[Callable[..., ConfigDict], str]:
    """Return the function `get_config` and the docstring of a config file; UserError as in `load_config`."""
    path = find_config(location)
    try:
        names = runpy.run_path(str(path)) if path.suffix == ".py" else {}
    except SyntaxError as error:
        raise UserError(f"config {path} is not valid Python: line {error.lineno}, {error.msg}") from error
    if "get_config" not in names:
        raise UserError(f"config {path} defines no get_config(arg) function")
    return names["get_config"], inspect.cleandoc(names["__doc__"] or "")


def split_references(text: str) -> list[str]:
    """Split a comma-separated list of configs: `a,b:x=1,y=2,c` gives `a`, `b:x=1,y=2` and `c`.

    An item with "=" and no ":" before it is a further option of the preceding config.
    """
    references: list[str] = []
    for part in text.split(","):
        if references and "=" in part and ":" not in part.partition("=")[0]:
            references[-1] += f",{part}"
        elif part:
            references.append(part)
    return references


def find_config(location: str) -> Path:
    """Return the path of a config file, given its path or its name in configs/; UserError if there is none."""
    candidates = [Path(location), Path(f"{location}.py"), CONFIG_FOLDER / location, CONFIG_FOLDER / f"{location}.py"]
    for candidate in candidates:
        if os.path.isfile(candidate):  # False, not an error, for an invalid file name
            return candidate
    names = sorted(path.stem for path in CONFIG_FOLDER.glob("*.py"))
    raise UserError(f"there is no config '{location}'{suggestion(Path(location).stem, names)}")


def override_pairs(overrides: Overrides | None) -> KeyValues:
    """Return overrides as pairs (dotted key, text of the value); [] for None."""
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    return [(key, repr(value) if isinstance(value, list | tuple) else str(value)) for key, value in pairs]


def apply_overrides(config: ConfigDict, overrides: KeyValues) -> ConfigDict:
    """Set keys of a config, in place, from pairs (dotted key, text), as `set_key` does, and return the config.

    `data.fill` becomes the mean of the backbone, unless it is set.

    Raises UserError if a key is unknown or repeated, or a text is not a value of the key.
    """
    keys = [key for key, _ in overrides]
    for key, text in overrides:
        if keys.count(key) > 1:
            raise UserError(f"--config.{key} is given twice")
        set_key(config, key, text, role="config key")
    if config.data.resize == "pad" and config.data.fill == KEYS["data.fill"].default:
        from mlmoe_jax.models.backbones import catalog  # here, because --help does without it

        backbone = config.model.backbone
        config.data.fill, _ = catalog.entry(backbone.name).normalization(backbone.normalization)
    return config


def set_key(config: ConfigDict, key: str, text: str, *, role: str) -> None:
    """Set one dotted key of the whole config, in place, to a value that is given as text, such as "0.1" or "a,b".

    The key `model.adapters` adds the adapters that `text` names. `role` is the term for the key in error messages, such
    as "config key". Raises UserError if the key is unknown, or the text is not a value of the key.
    """
    if key == ADAPTERS_SECTION:
        for name in filter(None, text.split(",")):
            use_adapter(config, name)
        return
    declared = key_named(key)
    if declared is None:
        raise UserError(f"{role} '{key}' {why_unknown(key)}")
    _assign(config, key, _parse(declared, text, f"{role} '{key}'"))


def _assign(config: ConfigDict, key: str, value: Any) -> None:
    if key.startswith(f"{ADAPTERS_SECTION}."):
        use_adapter(config, key.split(".")[-2])
    config.update_from_flattened_dict({key: value})


def _parse(key: Key, text: str, role: str) -> Any:
    try:
        return key.parse(text)
    except (ValueError, KeyError, SyntaxError, TypeError) as error:
        raise UserError(f"{role} takes {key.allowed} such as {key.format(key.default)}, not '{text}'") from error


def to_json(config: ConfigDict) -> str:
    """Return the config as JSON text, which `from_json` reads."""
    return json.dumps(config.to_dict(), indent=2)


def from_json(text: str, source: str = "the stored config", *, required: Sequence[str] = ()) -> ConfigDict:
    """Return the config that `to_json` stored. Missing keys get their default, and unknown keys are logged and ignored.

    Args:
      source: the term for the config in error messages.
      required: dotted keys that the text must contain.

    Raises:
      UserError: the JSON is damaged, a value has another type, or a required key is missing.
    """
    config = default_config()
    unknown = []
    with damage_explained(source):
        stored = flatten(json.loads(text))
        for name in required:
            stored[name]  # a KeyError names it
        for name, value in stored.items():
            if name in SECTIONS:
                raise ValueError(f"{name} should be an object")
            if key_named(name) is not None:
                _assign(config, name, to_tuples(value))
            else:
                unknown.append(name)
    if unknown:
        names = printable(", ".join(unknown), 1000)
        logging.getLogger(__name__).warning("%s has unknown keys, which are ignored: %s", source, names)
    return config
