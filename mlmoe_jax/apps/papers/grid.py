"""A grid of configs: the flags of `--sweep`, and the names of the run folders."""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config import keys
from mlmoe_jax.errors import UserError

METHOD = "config"  # the swept "key" whose values are configs


@dataclass
class Point:
    """One config of a grid."""

    name: str  # name of its folder, such as num_groups=2,seed=0
    values: dict[str, Any]  # swept key -> value
    config: ConfigDict


def parse(texts: Sequence[str], config: ConfigDict) -> dict[str, tuple]:
    """Parse `config.KEY=v1,v2,…` flags as key -> values; each value has the type of the key's current value.

    Commas inside brackets do not separate values, so `(1,2),(3,4)` are two tuples. The values of `config=` are configs
    with their arguments.

    Raises:
      UserError: for a malformed flag, and for a key that is repeated.
    """
    axes: dict[str, tuple] = {}
    for text in texts:
        key, _, listed = text.partition("=")
        key = key.strip().removeprefix("config.")
        if not key or not listed.strip():
            example = "--sweep=config.model.prompts.num_groups=2,3,5,8"
            raise UserError(f"--sweep={text} is not KEY=VALUE,VALUE,…, such as {example}")
        if key in axes:
            raise UserError(f"--sweep is given twice for {key}; list all its values in one")
        if key == METHOD:
            values = configuration.split_references(listed)
        else:
            values = (_typed(config, key, item) for item in _split(listed))
        axes[key] = tuple(dict.fromkeys(values))
    return axes


def _typed(config: ConfigDict, key: str, text: str) -> Any:
    """Return the value that the text sets a key to."""
    trial = copy.deepcopy(config)
    configuration.set_key(trial, key, text, what="--sweep key")
    return configuration.flatten(trial)[key]


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def combine(bases: Iterable[Point], axes: Mapping[str, tuple]) -> list[Point]:
    """Return each base with every combination of the values of keys, where the last key changes fastest."""
    points = []
    for base in bases:
        short = short_names(axes, base.config)
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            config = copy.deepcopy(base.config)
            config.update_from_flattened_dict(values)
            name = folder_name({short[key]: value for key, value in values.items()})
            points.append(Point(",".join(filter(None, (base.name, name))), {**base.values, **values}, config))
    return points


def method_points(references: Sequence[str], overrides: list[tuple[str, str]]) -> list[Point]:
    """Return one point per config, with overrides of keys; UserError as in `load_config`."""
    return [
        Point(folder_name({METHOD: one}), {METHOD: one}, configuration.load_config(one, overrides))
        for one in references
    ]


# ------------------------------------------------------------------------------------------------------------ names
def short_names(swept: Iterable[str], config: ConfigDict) -> dict[str, str]:
    """Return, for each dotted key, its shortest ending that no other key of the config has."""
    known = [key.split(".") for key in configuration.flatten(config)]
    names = {}
    for key in swept:
        parts = key.split(".")
        endings = (parts[start:] for start in range(len(parts) - 1, 0, -1))
        unique = (end for end in endings if sum(other[-len(end) :] == end for other in known) == 1)
        names[key] = ".".join(next(unique, parts))
    return names


def as_text(value: Any) -> str:
    """Return a value as in a `--sweep` flag, where tuples need brackets, since commas separate values."""
    return str(value) if isinstance(value, tuple) else keys.as_text(value)


def folder_name(values: dict[str, Any]) -> str:
    """Return `key=value,…` sorted by key, so that the order of the flags does not matter.

    It is safe on every file system: values that are long, or have characters other than letters, digits and "._+-", are
    truncated and get a digest.
    """
    return ",".join(f"{key}={_safe(values[key])}" for key in sorted(values))


def _safe(value: Any) -> str:
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        text = "+".join(value)
        plain = bool(value) and all(re.fullmatch(r"[A-Za-z0-9._-]+", item) for item in value)
    else:
        text = as_text(value)
        plain = re.fullmatch(r"[A-Za-z0-9._+-]*", text) is not None
    if plain and len(text) <= 60:
        return text
    digest = hashlib.sha256(repr(value).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._+-]+', '_', text)[:40]}-{digest}"
