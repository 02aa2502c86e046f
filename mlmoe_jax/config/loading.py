"""The configuration: loading, overrides, and one check of everything; `defaults.py` has the keys and their meaning.

A config file defines `get_config(arg="") -> ConfigDict`, starting from `default_config()`. What follows a colon in
`--config=file.py:dataset=digits,epochs=3` is handed to it; `parse_arg` splits it.
"""

import ast
import difflib
import importlib.util
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]


# An installed package carries the configs inside; a checkout has them beside the package.
CONFIG_FOLDER = next((f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if f.is_dir()), _PACKAGE)


def parse_arg(arg: str, **defaults: Any) -> ConfigDict:
    """Split `key=value,key=value` by `defaults`, which name the keys and give their types.

    Raises UserError for a key that is not among them, or a value of another type.
    """
    options = ConfigDict(defaults)
    seen: set[str] = set()
    for item in filter(None, arg.split(",")):
        key, equals, text = item.partition("=")
        if not equals:
            takes = f"it takes {', '.join(defaults)}" if defaults else "this config takes none"
            raise UserError(f"'{item}' after the config's colon is not key=value; {takes}")
        if key in seen:
            raise UserError(f"config argument '{key}' is given twice")
        seen.add(key)
        set_key(options, key, text, what="config argument")
    return options


def load_config(reference: str, overrides: list[tuple[str, str]]) -> ConfigDict:
    """Load `path.py:arg` or a bare name in configs/, and apply `overrides` ("a.b", "text").

    Raises UserError for a file or key that is not there and for a value of another type.
    """
    location, _, arg = reference.partition(":")
    path = _find_config(location)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise UserError(f"config {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"config {path} is not valid Python: line {error.lineno}, {error.msg}") from error
    if not hasattr(module, "get_config"):
        raise UserError(f"config {path} defines no get_config(arg) function")
    return apply_overrides(module.get_config(arg), overrides)


def _find_config(location: str) -> Path:
    candidates = [Path(location), Path(f"{location}.py"), CONFIG_FOLDER / location, CONFIG_FOLDER / f"{location}.py"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = sorted(path.stem for path in CONFIG_FOLDER.glob("*.py"))
    raise UserError(f"there is no config '{location}'{_suggestion(Path(location).stem, names)}")


def apply_overrides(config: ConfigDict, overrides: list[tuple[str, str]]) -> ConfigDict:
    """Set ("a.b", "text") pairs, each text read as the type of the key's default."""
    seen: set[str] = set()
    for key, text in overrides:
        if key in seen:
            raise UserError(f"--config.{key} is given twice")
        seen.add(key)
        set_key(config, key, text, what="config key")
    return config


def set_key(config: ConfigDict, key: str, text: str, *, what: str) -> None:
    """Set dotted `key` to `text` read as the type of the present value; UserError names what is wrong."""
    *parents, leaf = key.split(".")
    node = config
    for depth, name in enumerate([*parents, leaf]):
        if not isinstance(node, ConfigDict) or name not in node:
            known = list(node) if isinstance(node, ConfigDict) else []
            prefix = ".".join([*parents, leaf][:depth])
            where = f" under '{prefix}'" if prefix else ""
            raise UserError(f"{what} '{key}' does not exist: no '{name}'{where}{_suggestion(name, known)}")
        parent, node = node, node[name]
    if isinstance(node, ConfigDict):
        raise UserError(f"{what} '{key}' is a section; set one of {', '.join(f'{key}.{name}' for name in node)}")
    parent[leaf] = _read(text, node, f"{what} '{key}'")


def _read(text: str, present: Any, what: str) -> Any:
    try:
        if isinstance(present, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(present, tuple):
            if text[:1] not in ("(", "["):
                kind = float if present and all(isinstance(value, float) for value in present) else str
                return tuple(kind(part) for part in text.split(",") if part)
            value = ast.literal_eval(text)
            return tuple(_tuples(item) for item in value) if isinstance(value, tuple | list) else (value,)
        return type(present)(text)
    except (ValueError, KeyError, SyntaxError) as error:
        raise UserError(f"{what} takes a {type(present).__name__} such as {present!r}, not '{text}'") from error


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are {', '.join(known)}" if known else ""


def to_json(config: ConfigDict) -> str:
    """Return the config as JSON text, which `from_json` turns back into the same config."""
    return json.dumps(config.to_dict(), indent=2)


def from_json(text: str) -> ConfigDict:
    """Read a stored config over the defaults, so that keys added since it was written have their default."""
    config = default_config()

    def merge(node: ConfigDict, stored: dict) -> None:
        for key, value in stored.items():
            if isinstance(value, dict):
                merge(node[key], value)
            else:
                node[key] = _tuples(value) if isinstance(value, list) else value

    try:
        merge(config, json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the stored config is damaged: {str(error).partition('. ')[0]}") from error
    return config


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Return {"a.b": value} over all sections."""
    flat = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, ConfigDict) else {name: value}
    return flat
