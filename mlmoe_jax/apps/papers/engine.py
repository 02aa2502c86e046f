"""Train a grid of configs, each in a run folder of its own, one after another.

`--sweep` makes the grid from keys and values, `--mode=reproduce` from the rows of a published table. A run is locked by
its folder, and a run that another process holds is skipped. So any number of processes, also on several machines with a
common file system that has locks, can work on one grid. Object stores have no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers.grid import Point
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.data.labels.grouping import require_groups
from mlmoe_jax.data.sources.open import count_labels
from mlmoe_jax.errors import NoRoom, UserError
from mlmoe_jax.evaluation.results import Results, training_results
from mlmoe_jax.inference.explain import write_requested_samples
from mlmoe_jax.models.adapters.catalog import prompts_of
from mlmoe_jax.runs.assemble import preprocess_for
from mlmoe_jax.runs.checkpoint import newest_notes
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import InUse
from mlmoe_jax.training.loop import Stopped, train
from mlmoe_jax.training.resume import changed_keys
from mlmoe_jax.training.selection import Selection, require_metric

_FINISHED, _ELSEWHERE = "finished", "elsewhere"


@dataclass
class GridRun(Point):
    """One point of the grid with its folder, and its results if it is finished."""

    folder: RunFolder
    results: Results | None = None  # None = not finished
    selected: dict[str, Any] = field(default_factory=dict)  # see `selection_of`
    error: str = ""

    def read_results(self) -> None:
        """Read the results from the folder if the run is finished, by this process or another."""
        self.results = training_results(self.folder)
        self.selected = selection_of(self.folder) if self.results is not None else {}


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


def planned(points: Sequence[Point], folder: RunFolder) -> list[GridRun]:
    """Return the runs of a grid, each in its own folder below `folder`, with the results of finished runs.

    Raises:
      UserError: for a config that cannot be trained, and if a folder holds a run with a different config.
    """
    if (folder / CONFIG).exists():
        raise UserError(f"{folder} is itself the run folder of a training; choose another --workdir for several runs")
    runs, conflicts, counts = [], [], {}
    for point in points:
        run = GridRun(**vars(point), folder=folder.below(point.name))
        run.read_results()
        try:
            _require_trainable(run, counts)
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
    return runs


def _require_trainable(run: GridRun, counts: dict[str, int]) -> None:
    """Raise UserError for a config that cannot be trained; counts: a cache of the number of labels of data sets."""
    configuration.validate(run.config)
    require_metric(run.config)
    preprocess_for(run.config)
    prompts, data = run.config.model.prompts, run.config.data
    if run.results is None and prompts_of(run.config).uses_groups and prompts.groups == "computed":
        if (key := data.to_json()) not in counts:
            counts[key] = count_labels(data)
        require_groups(counts[key], prompts.num_groups)


def execute(runs: Sequence[GridRun], folder: RunFolder, write: Callable[[], None]) -> bool:
    """Train all runs that are not finished, and read their results.

    A run that fails gets an `error` and does not stop the remaining runs.

    Args:
      runs: as `planned` returns them.
      folder: the folder of the grid.
      write: writes the tables of the grid to `folder`. It is called in the first process, at the start and after every
        run, while this process holds the lock of the folder.

    Returns:
      False if a signal stopped the grid.
    """
    _write(runs, folder, write)
    for number, run in enumerate(runs, start=1):
        title = f"run {number} of {len(runs)}, {run.name}"
        state = distributed.broadcast_from_first(_state(run))  # all processes of a job have to do the same
        if state == _FINISHED:
            status(f"{title}: already finished")
            continue
        try:
            if state == _ELSEWHERE or not _train(run, title):
                status(f"{title}: skipped, as another process is training it")
        except (Stopped, KeyboardInterrupt) as stopped:
            status(f"{title}: {str(stopped) or 'stopped; the same command resumes from there'}")
            return False
        _write(runs, folder, write)
    return True


def _state(run: GridRun) -> str:
    """Return whether a run is finished or in use, which may have changed since the grid was planned; "" if neither."""
    if run.results is None:
        run.read_results()
    if run.results is not None:
        return _FINISHED
    return _ELSEWHERE if run.folder.is_in_use() else ""


def _train(run: GridRun, title: str) -> bool:
    """Train a run and note its results or its error; False if another process was faster to start it."""
    status(title)
    try:
        train(run.config, run.folder)
        write_requested_samples(run.folder, run.config)
        run.read_results()
    except UserError as error:
        noticed_alone = isinstance(error, InUse | BadImage) and distributed.process()[1] > 1
        if isinstance(error, NoRoom) or noticed_alone:  # the disk is full for the next run, or other processes wait
            raise
        if isinstance(error, InUse):
            return False
        run.error = str(error)
        status(f"{title}: {error}")
    return True


def _write(runs: Sequence[GridRun], folder: RunFolder, write: Callable[[], None]) -> None:
    if not distributed.is_first():
        return
    with folder.writing(wait=True):
        for run in runs:
            if run.results is None and not run.error:
                run.read_results()  # another process may have finished it
        write()


def require_no_errors(runs: Sequence[GridRun]) -> None:
    """Raise UserError if runs of a grid have failed."""
    if failed := [run for run in runs if run.error]:
        raise UserError(
            f"{len(failed)} of {len(runs)} runs failed, the first, {failed[0].name}, because: {failed[0].error}; "
            "rerun the same command to retry them"
        )
