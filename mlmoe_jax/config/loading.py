"""Configs from files, from the command line and from run folders. `table.py` has the keys.

A config file defines `get_config(arg="") -> ConfigDict`, which starts from `default_config()`. `arg` is the text after
the colon in `--config=file.py:dataset=digits,epochs=3`; `parse_arg` splits it. A file whose values depend on the
machine defines `get_config(arg="", run=None)`. `run` is the config of the resumed run, or None, so that a resumed run
keeps its values.
"""

import inspect
import json
import logging
import os
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config.defaults import default_config, flatten, use_adapter, why_unknown
from mlmoe_jax.config.table import ADAPTERS_SECTION, SECTIONS, key_named
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.keys import ChoiceKey, Key, key_like, to_tuples
from mlmoe_jax.runtime.registry import nearest, suggestion

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed package contains the configs; a checkout has them next to the package.
CONFIG_FOLDER = next((f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if f.is_dir()), _PACKAGE)

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def parse_arg(arg: str, **defaults: Any) -> ConfigDict:
    """Parse the options of a config, `key=value,key=value`.

    Args:
      arg: the text of the options.
      **defaults: option -> its default value, or a key such as a result of `choice`. The type of the default is the
        type of the option.

    Returns:
      option -> value, for all options in `defaults`.

    Raises:
      UserError: an option is unknown or repeated, or a value is not allowed.
    """
    keys = {name: default if isinstance(default, Key) else key_like(default) for name, default in defaults.items()}
    options = ConfigDict({name: key.default for name, key in keys.items()})
    for name, text in _split_options(arg, keys):
        role = f"config argument '{name}'"
        value = _parse(keys[name], text, role)
        if not keys[name].allows(value):
            raise UserError(f"{role} is '{text}' and must be {keys[name].allowed}{keys[name].hint(value)}")
        options[name] = value
    return options


def choice(names: Iterable[str], default: str = "") -> ChoiceKey:
    """Return an option for `parse_arg` whose value is one of `names`.

    Args:
      names: the allowed values.
      default: the default value; "": the first name.
    """
    choices = tuple(names)
    return ChoiceKey(default or choices[0], "", choices=choices)


def _split_options(arg: str, keys: Mapping[str, Key]) -> Iterator[tuple[str, str]]:
    """Yield (name, text of the value) for each option in `arg`.

    Args:
      arg: the text of the options, `key=value,key=value`.
      keys: option -> key, for all known options.

    Raises:
      UserError: an option is unknown or repeated.
    """
    seen = set()
    all_options = f"this config takes {', '.join(keys) or 'no arguments'}"
    for item in filter(None, arg.split(",")):
        name, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"'{item}' after the config's colon is not key=value; {all_options}")
        if name not in keys:
            raise UserError(f"config argument '{name}' does not exist{nearest(name, keys) or f'; {all_options}'}")
        if name in seen:
            raise UserError(f"config argument '{name}' is given twice")
        seen.add(name)
        yield name, text


def load_config(
    reference: str, overrides: list[tuple[str, str]], *, run: Callable[[], ConfigDict | None] = lambda: None
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
    path = find_config(location)
    try:
        get_config = runpy.run_path(str(path)).get("get_config") if path.suffix == ".py" else None
    except SyntaxError as error:
        raise UserError(f"config {path} is not valid Python: line {error.lineno}, {error.msg}") from error
    if get_config is None:
        raise UserError(f"config {path} defines no get_config(arg) function")
    further = {"run": run()} if "run" in inspect.signature(get_config).parameters else {}
    return apply_overrides(get_config(arg, **further), overrides)


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


def override_pairs(overrides: Overrides | None) -> list[tuple[str, str]]:
    """Return overrides as pairs (dotted key, text of the value); [] for None."""
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    return [(key, repr(value) if isinstance(value, list | tuple) else str(value)) for key, value in pairs]


def apply_overrides(config: ConfigDict, overrides: list[tuple[str, str]]) -> ConfigDict:
    """Set keys of a config as `set_key` does, and return the config.

    Args:
      config: the config, which is modified.
      overrides: pairs (dotted key, text of the value).

    Raises:
      UserError: a key is unknown or repeated, or a text is not a value of the key.
    """
    keys = [key for key, _ in overrides]
    for key, text in overrides:
        if keys.count(key) > 1:
            raise UserError(f"--config.{key} is given twice")
        set_key(config, key, text, role="config key")
    return config


def set_key(config: ConfigDict, key: str, text: str, *, role: str) -> None:
    """Set one key of a config to a value that is given as text.

    Args:
      config: the whole config, which is modified.
      key: the dotted key. `model.adapters` adds the adapters that `text` names.
      text: the value as text, such as "0.1" or "a,b".
      role: the term for the key in error messages, such as "config key".

    Raises:
      UserError: the key is unknown, or the text is not a value of the key.
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
    """Return the config that `to_json` stored. Missing keys get their default.

    Unknown keys are ignored, and a warning is logged.

    Args:
      text: the JSON text.
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
            if name in SECTIONS or key_named(name) is not None:
                _assign(config, name, to_tuples(value))
            else:
                unknown.append(name)
    if unknown:
        logging.getLogger(__name__).warning("%s has unknown keys, which are ignored: %s", source, ", ".join(unknown))
    return config
