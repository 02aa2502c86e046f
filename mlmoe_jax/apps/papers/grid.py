"""Train a grid of configs one after another, each in its own run folder.

`--sweep` makes the grid from keys and values, `--mode=reproduce` from the rows of a published table. A run folder is
locked during its training, and a locked run is skipped. So any number of processes, also on several machines with a
common file system that has locks, can work on one grid. Object stores have no locks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config import keys
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.data.labels.grouping import require_groups
from mlmoe_jax.data.sources.open import count_labels
from mlmoe_jax.errors import INTERRUPTED, DiskError, UserError
from mlmoe_jax.evaluation.results import Results, training_results
from mlmoe_jax.inference.explain import write_requested_samples
from mlmoe_jax.models.registries import prompts_class
from mlmoe_jax.runs.assemble import preprocess_for
from mlmoe_jax.runs.checkpoint import newest_notes
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.runs.naming import folder_name
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import InUse
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.training.loop import Stopped, train
from mlmoe_jax.training.resume import changed_keys
from mlmoe_jax.training.selection import Selection, require_metric

METHOD = "config"  # the swept "key" whose values are configs
_TRAINED_ELSEWHERE = "skipped, as another process is training it"


@dataclass
class GridPoint:
    """One config of a grid."""

    name: str  # name of its folder, such as num_groups=2,seed=0
    values: dict[str, Any]  # swept key -> value
    config: ConfigDict


# ------------------------------------------------------------------------------------------------------------ flags
def parse_sweep(texts: Sequence[str], config: ConfigDict) -> dict[str, tuple]:
    """Parse `config.KEY=v1,v2,…` flags as key -> values. Each value has the type of the key's current value.

    Commas inside brackets do not separate values, so `(1,2),(3,4)` are two tuples. The values of `config=` are configs
    with their arguments.

    Raises:
      UserError: a flag is malformed, or a key is repeated.
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
            values = (_read_value(config, key, item) for item in _split_values(listed))
        axes[key] = tuple(dict.fromkeys(values))
    return axes


def _read_value(config: ConfigDict, key: str, text: str) -> Any:
    """Convert a text to the type of a config key."""
    trial = copy.deepcopy(config)
    configuration.set_key(trial, key, text, role="--sweep key")
    return configuration.flatten(trial)[key]


def _split_values(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def combine_axes(bases: Iterable[GridPoint], axes: Mapping[str, tuple]) -> list[GridPoint]:
    """Return every base with every combination of swept values; the last key changes fastest."""
    points = []
    for base in bases:
        short = short_names(axes, base.config)
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            config = copy.deepcopy(base.config)
            config.update_from_flattened_dict(values)
            name = point_name({short[key]: value for key, value in values.items()})
            points.append(GridPoint(",".join(filter(None, (base.name, name))), {**base.values, **values}, config))
    return points


def method_points(references: Sequence[str], overrides: list[tuple[str, str]]) -> list[GridPoint]:
    """Return one point per config, with overrides of keys; UserError as in `load_config`."""
    return [
        GridPoint(point_name({METHOD: one}), {METHOD: one}, configuration.load_config(one, overrides))
        for one in references
    ]


# ------------------------------------------------------------------------------------------------------------ names
def short_names(swept: Iterable[str], config: ConfigDict) -> dict[str, str]:
    """Return for each dotted key its shortest ending that no other key of the config has."""
    known = [key.split(".") for key in configuration.flatten(config)]
    names = {}
    for key in swept:
        parts = key.split(".")
        endings = (parts[start:] for start in range(len(parts) - 1, 0, -1))
        unique = (end for end in endings if sum(other[-len(end) :] == end for other in known) == 1)
        names[key] = ".".join(next(unique, parts))
    return names


def value_text(value: Any) -> str:
    """Return the text of a value in a `--sweep` flag. Tuples get brackets, because commas separate values."""
    return str(value) if isinstance(value, tuple) else keys.format_value(value)


def point_name(values: dict[str, Any]) -> str:
    """Return the folder name of a point: `key=value,…`, sorted so that the order of flags does not matter."""
    return folder_name([(key, value_text(values[key])) for key in sorted(values)])


# ------------------------------------------------------------------------------------------------------------- runs
@dataclass
class GridRun(GridPoint):
    """A point of the grid with its run folder, and with its results once it is finished."""

    folder: RunFolder
    results: Results | None = None  # None = not finished
    selected: str = ""  # the selected weights; "" if the checkpoints are missing or damaged
    error: str = ""

    def read_results(self) -> None:
        """Read the results from the folder if this or another process has finished the run."""
        self.results = training_results(self.folder)
        if self.results is not None and (notes := newest_notes(self.folder)):
            self.selected = str(Selection.from_notes({}, notes))


def plan_runs(points: Sequence[GridPoint], folder: RunFolder) -> list[GridRun]:
    """Return the runs of a grid, each in its own folder below `folder`, with the results of finished runs.

    Raises:
      UserError: a config cannot be trained, or a folder holds a run with a different config.
    """
    if (folder / CONFIG).exists():
        raise UserError(f"{folder} is itself the run folder of a training; choose another --workdir for several runs")
    runs, counts = [], {}
    for point in points:
        run = GridRun(**vars(point), folder=folder.below(point.name))
        run.read_results()
        try:
            _require_trainable(run, counts)
        except UserError as error:
            raise UserError(f"the run {run.name} cannot be trained: {error}") from error
        if changed := changed_keys(run.config, run.folder):
            raise UserError(
                f"{run.folder} holds a run with a different config ({'; '.join(changed)}); rerun the original command "
                "to resume, or choose another --workdir"
            )
        runs.append(run)
    return runs


def _require_trainable(run: GridRun, counts: dict[str, int]) -> None:
    """Raise UserError for a config that cannot be trained. `counts` caches the number of labels per data set."""
    configuration.validate(run.config)
    require_metric(run.config)
    preprocess_for(run.config)
    prompts, data = run.config.model.prompts, run.config.data
    if run.results is None and prompts_class(run.config).uses_groups and prompts.groups == "computed":
        if (key := data.to_json()) not in counts:
            counts[key] = count_labels(data)
        require_groups(counts[key], prompts.num_groups)


def execute(
    runs: Sequence[GridRun], folder: RunFolder, write: Callable[[], None], report: Callable[[], Outcome]
) -> Outcome:
    """Train all unfinished runs, and read their results.

    A run that fails gets an `error` and does not stop the remaining runs.

    Args:
      runs: result of `plan_runs`.
      folder: the folder of the grid.
      write: writes the tables of the grid to `folder`. The first process calls it at the start and after every run,
        while it holds the lock of the folder.
      report: draws the results and returns what to print. The first process calls it after all runs.

    Returns:
      What to print, with an error if runs have failed. After SIGTERM or Ctrl-C nothing but the exit code 130.
    """
    _write(runs, folder, write)
    for number, run in enumerate(runs, start=1):
        title = f"run {number} of {len(runs)}, {run.name}"
        reason = distributed.broadcast_from_first(_reason_to_skip(run))  # one decision for all processes
        status(f"{title}: {reason}" if reason else title)
        if not reason:
            try:
                _train(run, title)
            except (Stopped, KeyboardInterrupt) as stopped:
                status(f"{title}: {str(stopped) or 'stopped; the same command resumes from there'}")
                return Outcome(exit_code=INTERRUPTED)
        _write(runs, folder, write)
    outcome = report() if distributed.is_first() else Outcome()
    status(f"tables and runs: {folder}")
    if failed := [run for run in runs if run.error]:
        error = UserError(
            f"{len(failed)} of {len(runs)} runs failed, the first, {failed[0].name}, because: {failed[0].error}; "
            "rerun the same command to retry them"
        )
        return replace(outcome, error=error)
    return outcome


def _reason_to_skip(run: GridRun) -> str:
    """Return why a run is skipped now, or ""; other processes may have started or finished it."""
    if run.results is None:
        run.read_results()
    if run.results is not None:
        return "already finished"
    return _TRAINED_ELSEWHERE if run.folder.is_in_use() else ""


def _train(run: GridRun, title: str) -> None:
    """Train a run and set its results or its error. If another process trains it, set neither."""
    try:
        train(run.config, run.folder)
        write_requested_samples(run.folder, run.config)
        run.read_results()
    except UserError as error:
        noticed_alone = isinstance(error, InUse | BadImage) and distributed.process()[1] > 1
        if isinstance(error, DiskError) or noticed_alone:  # the next run would fail too, or other processes wait
            raise
        in_use = isinstance(error, InUse)
        run.error = "" if in_use else str(error)
        status(f"{title}: {_TRAINED_ELSEWHERE if in_use else error}")


def _write(runs: Sequence[GridRun], folder: RunFolder, write: Callable[[], None]) -> None:
    if not distributed.is_first():
        return
    with folder.writing(wait=True):
        for run in runs:
            if run.results is None and not run.error:
                run.read_results()  # another process may have finished it
        write()
