"""Train the runs of a grid, one after another, beside other processes that work on the same grid.

Each run is locked by its own folder: a run that another process holds is skipped, so any number of processes, also on
several machines with a common file system that has locks, can work on one grid. Object stores have no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlmoe_jax.apps.papers.sweep.grid import GridRun
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.errors import NoRoom, UserError
from mlmoe_jax.inference.explain import write_requested_samples
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import InUse
from mlmoe_jax.training.loop import Stopped, train

_FINISHED, _ELSEWHERE = "finished", "elsewhere"


def execute(runs: Sequence[GridRun], folder: RunFolder, write: Callable[[], None]) -> bool:
    """Train all runs that are not finished, and fill in their results; False if a signal stopped it.

    A failed run gets an `error` and does not stop the others; a run that another process trains is marked `elsewhere`.
    write: writes the tables of the grid to `folder`; called in the first process, at the start and after every run,
    while this process holds the lock of the folder.
    """
    _write(runs, folder, write)
    for number, run in enumerate(runs, start=1):
        title = f"run {number} of {len(runs)}, {run.name}"
        state = distributed.broadcast_from_first(_state(run))  # all processes of a job have to do the same
        if state == _FINISHED:
            status(f"{title}: already finished")
            continue
        run.elsewhere = state == _ELSEWHERE
        if not run.elsewhere:
            status(title)
            try:
                train(run.config, run.folder)
                write_requested_samples(run.folder, run.config)
                run.read_results()
            except UserError as error:
                if isinstance(error, NoRoom):
                    raise  # the next run would find none either
                if isinstance(error, InUse | BadImage) and distributed.process()[1] > 1:
                    raise  # only one process has noticed, and the others would wait for it
                run.elsewhere = isinstance(error, InUse)
                if not run.elsewhere:
                    run.error = str(error)
                    status(f"{title}: {error}")
            except (Stopped, KeyboardInterrupt) as stopped:
                status(f"{title}: {str(stopped) or 'stopped; the same command resumes from there'}")
                return False
        if run.elsewhere:
            status(f"{title}: skipped, as another process is training it")
        _write(runs, folder, write)
    return True


def _state(run: GridRun) -> str:
    """Return whether a run is finished or in use, which may have changed since the grid was planned; "" if neither."""
    if run.results is None:
        run.read_results()
    if run.results is not None:
        return _FINISHED
    return _ELSEWHERE if run.folder.is_in_use() else ""


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
