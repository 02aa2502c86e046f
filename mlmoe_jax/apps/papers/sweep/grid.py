"""A grid of trainings: their configs, their folders, and the results of finished runs.

A grid is a list of points, each a config with a name; `--sweep` makes them from keys and values, `--mode=reproduce`
from the rows of a published table. `planned` checks them all and reads the results of those that are finished.
"""

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
from mlmoe_jax.data.labels.grouping import require_groups
from mlmoe_jax.data.sources.open import count_labels
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import Results, training_results
from mlmoe_jax.runs.assemble import preprocess_for
from mlmoe_jax.runs.checkpoint import newest_notes
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.training.resume import changed_keys
from mlmoe_jax.training.selection import Selection, require_metric

METHOD = "config"  # the swept "key" whose values are configs


@dataclass(frozen=True)
class SweepAxis:
    """One swept key and its values."""

    key: str
    values: tuple


@dataclass(frozen=True)
class Point:
    """One config of a grid."""

    name: str  # name of its folder, such as num_groups=2,seed=0
    values: dict[str, Any]  # swept key -> value
    config: ConfigDict


@dataclass
class GridRun:
    """One point of the grid, with its results if it is finished."""

    name: str
    values: dict[str, Any]
    config: ConfigDict
    folder: RunFolder
    results: Results | None = None  # None = not finished
    selected: dict[str, Any] = field(default_factory=dict)  # see `selection_of`
    error: str = ""
    elsewhere: bool = False  # another process is training it

    def read_results(self) -> None:
        """Read the results from its folder if the run is finished, by this process or another."""
        self.results = training_results(self.folder)
        self.selected = selection_of(self.folder) if self.results is not None else {}


def parse(texts: Sequence[str], config: ConfigDict) -> list[SweepAxis]:
    """Parse `config.KEY=v1,v2,…` flags; each value has the type of the key's current value.

    Commas inside brackets do not separate values, so `(1,2),(3,4)` are two tuples. `config=` itself has configs as
    values, with their arguments. Raises UserError for malformed flags and for a key or value that is given twice.
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
        for item in configuration.split_references(listed) if key == METHOD else _split(listed):
            value = item
            if key != METHOD:
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


def combine(bases: Iterable[Point], swept: Sequence[SweepAxis]) -> list[Point]:
    """Return each base with every combination of the swept values, where the last key changes fastest."""
    points = []
    for base in bases:
        short = short_names([one.key for one in swept], base.config)
        for combination in itertools.product(*(one.values for one in swept)):
            values = {one.key: value for one, value in zip(swept, combination, strict=True)}
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


def plan(config: ConfigDict, folder: RunFolder, swept: Sequence[SweepAxis]) -> list[GridRun]:
    """Return the runs of a config with all combinations of the swept values; see `planned`."""
    return planned(combine([Point("", {}, config)], swept), folder)


def planned(points: Sequence[Point], folder: RunFolder) -> list[GridRun]:
    """Return the runs of a grid, each in its own folder below `folder`, with the results of finished runs.

    Raises UserError for a config that cannot be trained, and if a folder holds a run with a different config.
    """
    if (folder / CONFIG).exists():
        raise UserError(f"{folder} is itself the run folder of a training; choose another --workdir for several runs")
    runs, conflicts = [], []
    for point in points:
        run = GridRun(point.name, point.values, point.config, folder.below(point.name))
        try:
            configuration.validate(run.config)
            require_metric(run.config)
            preprocess_for(run.config)
        except UserError as error:
            raise UserError(f"the run {run.name} cannot be trained: {error}") from error
        if changed := changed_keys(run.config, run.folder):
            conflicts.append(f"{run.name} ({'; '.join(changed)})")
        runs.append(run)
    if conflicts:
        raise UserError(
            f"{folder} holds runs with a different config: {', '.join(conflicts)}; rerun the original command to "
            "resume, or choose another --workdir"
        )
    for run in runs:
        run.read_results()
    _require_groups([run for run in runs if run.results is None])
    return runs


def _require_groups(runs: Sequence[GridRun]) -> None:
    """Raise UserError for a run whose labels cannot be divided into its groups; own tables are opened to count them."""
    counts: dict[str, int] = {}
    for run in runs:
        prompts, data = run.config.model.prompts, run.config.data
        if prompts.kind != "group" or prompts.groups != "computed":
            continue
        try:
            if (key := data.to_json()) not in counts:
                counts[key] = count_labels(data)
            require_groups(counts[key], prompts.num_groups)
        except UserError as error:
            raise UserError(f"the run {run.name} cannot be trained: {error}") from error


def selection_of(folder: RunFolder) -> dict[str, Any]:
    """Return step, kind, split and metric of a run's selected weights, the last two "" if they are the last ones.

    {} if its checkpoints are missing or damaged.
    """
    notes = newest_notes(folder, partial(Selection.from_notes, {}))
    if not notes:
        return {}
    selection = Selection.from_notes({}, notes)
    chosen = {"step": selection.step, "kind": selection.kind, "split": selection.split}
    return chosen | {"metric": selection.metric if selection.split else ""}
