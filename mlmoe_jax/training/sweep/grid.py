"""The grid of a sweep: its runs, their folders, and the results of finished runs."""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config import keys
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import Results, training_results
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import preprocess_for
from mlmoe_jax.runs.folder import CHECKPOINTS, CONFIG, RunFolder
from mlmoe_jax.training.resume import changed_keys
from mlmoe_jax.training.selection import Selection, require_metric


@dataclass(frozen=True)
class SweepAxis:
    """One swept key and its values."""

    key: str
    values: tuple


@dataclass
class GridRun:
    """One point of the grid, with its results if it is finished."""

    name: str  # name of its folder, such as num_groups=2,seed=0
    values: dict[str, Any]  # swept key -> value
    config: ConfigDict
    folder: RunFolder
    results: Results | None = None  # None = not finished
    selected: dict[str, Any] = field(default_factory=dict)  # see `selection_of`
    error: str = ""


def parse(texts: Sequence[str], config: ConfigDict) -> list[SweepAxis]:
    """Parse `config.KEY=v1,v2,…` flags; each value has the type of the key's current value.

    Commas inside brackets do not separate values, so `(1,2),(3,4)` are two tuples. Raises UserError for malformed flags
    and for a key or value that is given twice.
    """
    swept: list[SweepAxis] = []
    for text in texts:
        key, _, listed = text.partition("=")
        key = key.strip().removeprefix("config.")
        if not key or not listed.strip():
            raise UserError(
                f"--sweep={text} is not KEY=VALUE,VALUE,…, such as --sweep=config.model.prompts.num_groups=2,3,5,8"
            )
        if key in {earlier.key for earlier in swept}:
            raise UserError(f"--sweep is given twice for {key}; list all its values in one")
        values = []
        for item in _split(listed):
            trial = copy.deepcopy(config)
            configuration.set_key(trial, key, item, what="--sweep key")
            value = configuration.flatten(trial)[key]
            if value in values:
                raise UserError(f"--sweep={text} gives {key} the value {as_text(value)} twice")
            values.append(value)
        swept.append(SweepAxis(key, tuple(values)))
    return swept


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise UserError(f"--sweep values {text} have an unmatched bracket")
    return [part.strip() for part in parts]


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


def plan(config: ConfigDict, folder: RunFolder, swept: Sequence[SweepAxis]) -> list[GridRun]:
    """Return the runs of the grid, where the last key changes fastest, with the results of finished runs.

    Raises UserError for a value that the config does not allow, and if a folder holds a run with a different config.
    """
    if (folder / CONFIG).exists():
        raise UserError(f"{folder} is itself the run folder of a training; choose another --workdir for the sweep")
    short = short_names([one.key for one in swept], config)
    runs, conflicts = [], []
    for combination in itertools.product(*(one.values for one in swept)):
        values = {one.key: value for one, value in zip(swept, combination, strict=True)}
        name = folder_name({short[key]: value for key, value in values.items()})
        run = GridRun(name, values, copy.deepcopy(config), folder.below(name))
        run.config.update_from_flattened_dict(values)
        try:
            configuration.validate(run.config)
            require_metric(run.config)
            preprocess_for(run.config)
        except UserError as error:
            raise UserError(f"the sweep's run {name} cannot be trained: {error}") from error
        if changed := changed_keys(run.config, run.folder):
            conflicts.append(f"{name} ({'; '.join(changed)})")
        runs.append(run)
    if conflicts:
        raise UserError(
            f"{folder} holds runs with a different config: {', '.join(conflicts)}; rerun the original command to "
            "resume, or choose another --workdir"
        )
    for run in runs:
        run.results = training_results(run.folder)
        run.selected = selection_of(run.folder) if run.results is not None else {}
    return runs


def selection_of(folder: RunFolder) -> dict[str, Any]:
    """Return step, kind, split and metric of a run's selected weights, the last two "" if they are the last ones.

    {} if its checkpoints are missing or damaged.
    """
    if not (folder / CHECKPOINTS).exists():
        return {}
    with checkpoint.open_manager(folder, writing=False) as manager:
        notes = checkpoint.newest_notes(manager, partial(Selection.from_notes, {}))
    if not notes:
        return {}
    selection = Selection.from_notes({}, notes)
    chosen = {"step": selection.step, "kind": selection.kind, "split": selection.split}
    return chosen | {"metric": selection.metric if selection.split else ""}
