"""The default run folder of a command, which decides which commands belong to one run."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence

from mlmoe_jax.config.loading import CONFIG_FOLDER, find_config
from mlmoe_jax.config.table import entry_named
from mlmoe_jax.runtime.keys import KeyValues

RUNS = "runs"  # the folder of runs without --workdir, below the working directory
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")
_LONGEST = 100  # file systems allow 255; the folders of a sweep append to it


def default_folder(
    reference: str,
    overrides: KeyValues = (),
    *,
    mode: str = "train",
    sweep: Sequence[str] = (),
) -> str:
    """Return the default run folder of a command, such as `runs/mlvpt_dinov2,dataset=voc2012,seed=1`.

    Commands of different runs get different names. If a name is too long, or has characters that are unsafe in a file
    name, it ends in a digest of all settings. The order of arguments and of overrides does not matter.

    Args:
      reference: the config file with its arguments, as in `load_config`.
      overrides: pairs (dotted key, text). Keys that may change when a run resumes are not part of the name.
      mode: the mode of the command. It is part of the name if it is not "train".
      sweep: texts `config.KEY=VALUE,…` as on the command line. Only the keys are part of the name.
    """
    config, _, arguments = reference.partition(":")
    parts = sorted(argument.partition("=")[::2] for argument in arguments.split(",") if argument)
    parts += sorted((key, value) for key, value in overrides if _is_named(key))
    if mode != "train":
        parts.append(("mode", mode))
    if sweep:
        swept = [text.partition("=")[0].strip().removeprefix("config.") for text in sweep]
        parts.append(("sweep", "+".join(sorted(swept))))
    return f"{RUNS}/{folder_name(parts, config=_config_name(config))}"


def folder_name(settings: KeyValues, *, config: str = "") -> str:
    """Return a folder name for pairs (key, value), `config,key=value,…`; an empty `config` is left out.

    A name that is too long is shortened, and unsafe characters are replaced. In both cases a digest of the settings is
    appended.
    """
    first = [config] if config else []
    exact = ",".join([*first, *(f"{key}={value}" for key, value in settings)])
    name = ",".join([*map(_readable, first), *(f"{key}={_readable(value)}" for key, value in settings)])
    if name == exact and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def _config_name(location: str) -> str:
    """Return the name of a config in configs/; for another config file, its path without the suffix."""
    path = find_config(location)
    if path.resolve().parent == CONFIG_FOLDER.resolve():
        return path.stem
    return os.path.normpath(location).removesuffix(".py")


def _is_named(key: str) -> bool:
    """Return whether an override of `key` is part of the name of the run folder."""
    entry = entry_named(key)
    return entry is None or entry.on_resume in ("fixed", "at_start")


def _readable(value: str) -> str:
    """Return `value` with unsafe characters replaced by "-". Of a path, only the last part is returned."""
    last = os.path.basename(value.rstrip("/"))
    return _UNSAFE.sub("-", last).strip("-") if _UNSAFE.search(last) else last
