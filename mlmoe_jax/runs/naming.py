"""The config keys that may change when a run resumes, and the default name of a run folder.

Both decide which commands belong to one run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence

from ml_collections import ConfigDict

from mlmoe_jax.config.loading import CONFIG_FOLDER, find_config
from mlmoe_jax.data.sources.open import DATA_SETS

# Keys and sections (with a dot at the end) that may differ when a run resumes: they do not change its results.
FREE_KEYS = (
    "data.root",
    "data.threads",
    "data.workers",
    "pack.",
    "prune.",
    "init_from",  # only read when a run starts
    "train.skip_nonfinite",
    "train.log_every",
    "eval.batch_size",
    "checkpoint.",
    "mesh.",
    "log.",
    "metrics.",
    "thresholds.",
    "calibration.",
    "report.",
    "serve.",
)
# Keys that may differ with a message, so that a long run can go on after a bad image or a lack of memory.
REPORTED_KEYS = ("data.bad_images", "data.exif", "data.truncated", "model.remat", "train.accumulate")

RUNS = "runs"  # the folder of runs without --workdir, below the working directory
_NAMED = ("init_from", "prune.")  # free, but part of the name of a run
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")
_LONGEST = 100  # file systems allow 255; the folders of a sweep append to it


def default_folder(
    reference: str, overrides: Sequence[tuple[str, str]], config: ConfigDict, *, mode: str, sweep: Sequence[str]
) -> str:
    """Return the run folder of a command without --workdir.

    Args:
      reference: see `run_name`.
      overrides: see `run_name`.
      config: the config that results from `reference` and `overrides`.
      mode: see `run_name`.
      sweep: `config.KEY=VALUE,…` as on the command line.
    """
    own_root = DATA_SETS[config.data.name].published is None
    swept = [text.partition("=")[0].strip().removeprefix("config.") for text in sweep]
    return f"{RUNS}/{run_name(reference, overrides, mode=mode, swept=swept, own_root=own_root)}"


def run_name(
    reference: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    mode: str = "train",
    swept: Iterable[str] = (),
    own_root: bool = True,
) -> str:
    """Return the name of the folder of a run, such as `mlvpt_dinov2,dataset=voc2012,seed=1`.

    Commands of different runs have different names: a name that is too long, or has characters that are unsafe in a
    file name, ends in a digest of the whole command. The order of arguments and of overrides does not matter.

    Args:
      reference: the config file with its arguments, as in `load_config`.
      overrides: ("section.key", "text"). Keys with which a run may resume are not part of the name.
      mode: part of the name if it is not "train".
      swept: the keys of a sweep.
      own_root: whether `root` and `data.root` name the data; for a published data set they are only its place.
    """
    config, _, arguments = reference.partition(":")
    settings = [argument.partition("=")[::2] for argument in arguments.split(",") if argument]
    parts = sorted((key, value) for key, value in settings if own_root or key != "root")
    parts += sorted((key, value) for key, value in overrides if _is_named(key, own_root))
    if mode != "train":
        parts.append(("mode", mode))
    if swept := sorted(swept):
        parts.append(("sweep", "+".join(swept)))
    return folder_name(parts, config=_config_name(config))


def folder_name(settings: Sequence[tuple[str, str]], *, config: str = "") -> str:
    """Return `config,key=value,…` as the name of a folder, with a digest if it is long or has unsafe characters."""
    first = [config] if config else []
    exact = ",".join([*first, *(f"{key}={value}" for key, value in settings)])
    name = ",".join([*map(_readable, first), *(f"{key}={_readable(value)}" for key, value in settings)])
    return name if name == exact and len(name) <= _LONGEST else _with_digest(name, exact)


def _config_name(location: str) -> str:
    """Return the name of a config that comes with the package, or the path of another one without its suffix."""
    path = find_config(location)
    if path.resolve().parent == CONFIG_FOLDER.resolve():
        return path.stem
    return os.path.normpath(location).removesuffix(".py")


def _with_digest(name: str, exact: str) -> str:
    """Return a name of at most _LONGEST letters, if possible of whole parts, and a digest of the exact name."""
    if len(name) > _LONGEST:
        name = name[:_LONGEST].rpartition(",")[0] or name[:_LONGEST]
    return f"{name}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def _is_named(key: str, own_root: bool) -> bool:
    """Return whether an override is part of the name."""
    if key == "data.root":
        return own_root
    return key.startswith(_NAMED) or not (key in REPORTED_KEYS or is_free(key))


def is_free(key: str) -> bool:
    """Return whether a key or its section is one of FREE_KEYS."""
    return key in FREE_KEYS or f"{key.partition('.')[0]}." in FREE_KEYS


def _readable(value: str) -> str:
    """Return a value without unsafe characters; of a path only the last part."""
    last = os.path.basename(value.rstrip("/"))
    return _UNSAFE.sub("-", last).strip("-") if _UNSAFE.search(last) else last
