"""Train a grid of configs one after another, each in its own run folder.

`--sweep` makes the grid from config keys and values. `mlmoe reproduce` makes it from the rows of a published table. A
run folder is locked during its training, and a locked run is skipped. Therefore, several processes can train the runs
of one grid, also on several machines that share a file system with locks. Object stores have no locks.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.errors import DONE, USER_ERROR, DiskError, UserError
from mlmoe_jax.evaluation.results import Results
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.inference.explain import write_requested_samples
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.naming import folder_name
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.keys import KeyValues, format_value
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import InUse
from mlmoe_jax.training.loop import require_trainable, train
from mlmoe_jax.training.resume import changed_keys

METHOD = "config"  # the swept "key" whose values are configs
_SEPARATOR = r",(?![^(\[]*[)\]])"  # a comma outside of brackets
_TRAINED_ELSEWHERE = "skipped, as another process is training it"


@dataclass
class GridPoint:
    """One config of a grid of trainings."""

    name: str  # name of its folder, such as num_groups=2,seed=0
    values: dict[str, Any]  # swept key -> value
    config: ConfigDict


# ------------------------------------------------------------------------------------------------------------ flags
def parse_sweep(texts: Sequence[str], config: ConfigDict) -> dict[str, tuple]:
    """Parse the values of the flag `--sweep`, which have the form `config.KEY=v1,v2,…` or `config=NAME,NAME,…`.

    Commas inside brackets do not separate values, so `(1,2),(3,4)` are two tuples. A value gets the type of its key in
    `config`, which has all keys. Returns key -> values. The values of the key METHOD ("config") are names of configs
    with their arguments. Raises UserError if a flag is malformed, or a key is repeated.
    """
    axes: dict[str, tuple] = {}
    trial = copy.deepcopy(config)
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
            values = []
            for item in re.split(_SEPARATOR, listed):
                configuration.set_key(trial, key, item.strip(), role="--sweep key")
                values.append(configuration.flatten(trial)[key])
        axes[key] = tuple(dict.fromkeys(values))
    return axes


def combine_axes(bases: Iterable[GridPoint], axes: Mapping[str, tuple]) -> list[GridPoint]:
    """Return one grid point per combination of a base config and swept values.

    `axes` maps each swept key to its values. The values of the last key vary fastest.
    """
    points = []
    for base in bases:
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            config = copy.deepcopy(base.config)
            config.update_from_flattened_dict(values)
            name = ",".join(filter(None, (base.name, point_name(values, base.config))))
            points.append(GridPoint(name, {**base.values, **values}, config))
    return points


def method_points(references: Sequence[str], overrides: KeyValues) -> list[GridPoint]:
    """Return one grid point per reference, the name of a config with its arguments, with equal overrides."""
    points = []
    for reference in references:
        values, config = {METHOD: reference}, configuration.load_config(reference, overrides)
        points.append(GridPoint(point_name(values, config), values, config))
    return points


# ------------------------------------------------------------------------------------------------------------ names
def short_name(key: str, config: ConfigDict) -> str:
    """Return the shortest suffix of a dotted key that identifies it, as `learning_rate` for `optim.learning_rate`."""
    known, parts = configuration.flatten(config), key.split(".")
    for start in range(len(parts) - 1, 0, -1):
        ending = ".".join(parts[start:])
        if sum(f".{other}".endswith(f".{ending}") for other in known) == 1:
            return ending
    return key


def value_text(value: Any) -> str:
    """Return a value as text for the flag `--sweep`. Tuples get brackets, because commas separate the swept values."""
    return str(value) if isinstance(value, tuple) else format_value(value)


def point_name(values: dict[str, Any], config: ConfigDict) -> str:
    """Return the folder name of a grid point, `key=value,key=value,…`, with sorted keys, shortened by `short_name`."""
    named = {short_name(key, config): value_text(value) for key, value in values.items()}
    return folder_name(sorted(named.items()))


# ------------------------------------------------------------------------------------------------------------- runs
@dataclass
class GridRun(GridPoint):
    """A grid point with its run folder and, after its training, its results."""

    folder: RunFolder
    results: Results = field(default_factory=dict)  # {} = not finished
    error: str = ""

    def read_results(self) -> None:
        """Set `results` from the run folder; {} if no process has finished the training yet."""
        self.results = StoredRun(self.folder).final_metrics or {}


def plan_runs(points: Sequence[GridPoint], folder: RunFolder) -> list[GridRun]:
    """Check the configs of a grid, and return its runs. Their results are not set; `train_missing` sets them.

    Each run has a folder below `folder`. UserError if a config cannot be trained, or a folder has a run of another
    config.
    """
    runs = [GridRun(**vars(point), folder=folder.below(point.name)) for point in points]
    for run in runs:
        try:
            require_trainable(run.config)
        except UserError as error:
            raise UserError(f"the run {run.name} cannot be trained: {error}") from error
        if changed := changed_keys(run.config, run.folder):
            raise UserError(
                f"{run.folder} holds a run with a different config ({'; '.join(changed)}); rerun the original command "
                "to resume, or choose another --workdir"
            )
    return runs


def train_missing(runs: Sequence[GridRun], folder: RunFolder, write: Callable[[], None]) -> int:
    """Train all unfinished runs of a grid, read their results, and return DONE, or USER_ERROR if a run failed.

    If a training fails, the attribute `error` of the run is set, and the remaining runs are trained. After every
    training and at the end, the first process holds the lock of `folder` and calls `write`, which writes the results to
    the folder.
    """
    for number, run in enumerate(runs, start=1):
        title = f"run {number} of {len(runs)}, {run.name}"
        reason = distributed.broadcast_from_first(_reason_to_skip(run))  # one decision for all processes
        status(f"{title}: {reason}" if reason else title)
        if not reason:
            _train(run, title)
            _write(runs, folder, write)
    _write(runs, folder, write)
    status(f"tables and runs: {folder}")
    failed = [run for run in runs if run.error]
    if not failed:
        return DONE
    status(
        f"error: {len(failed)} of {len(runs)} runs failed, the first, {failed[0].name}, because: {failed[0].error}; "
        "rerun the same command to retry them"
    )
    return USER_ERROR


def _reason_to_skip(run: GridRun) -> str:
    """Return the reason to skip a run: it is finished, or another process is training it. Return "" to train it."""
    run.read_results()
    if run.results:
        return "already finished"
    return _TRAINED_ELSEWHERE if run.folder.is_in_use() else ""


def _train(run: GridRun, title: str) -> None:
    """Train a run, and set its attribute `results` or `error`. If another process is training the run, set neither."""
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
            if not run.results:
                run.read_results()  # another process may have finished it
        write()
