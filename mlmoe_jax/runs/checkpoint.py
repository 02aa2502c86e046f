"""Saving and restoring checkpoints with Orbax.

A checkpoint has four items: `state` (step, trainable, stats, optimizer, averages: all that training resumes
from), `selected` (the values for evaluation and prediction), `notes` (plain JSON, such as the best metric so far) and
`digests` (a sha256 of every array). Orbax keeps no checksum of array data, so flipped bits would be restored
silently as other numbers. If the digests of a restored checkpoint differ, the one before it is used.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import CHECKPOINTS, RunFolder
from mlmoe_jax.runtime import distributed, watchdog
from mlmoe_jax.runtime.progress import status


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint; `state` is None if only the selected values were requested."""

    step: int
    selected: Any
    notes: dict[str, Any]
    state: Any = None


@contextlib.contextmanager
def open_manager(folder: RunFolder, *, keep: int = 2, writing: bool = True) -> Iterator[ocp.CheckpointManager]:
    """Open the checkpoints of a run folder, of which the newest `keep` are kept, and close them at the end.

    writing: make the folder, and remove checkpoints that a killed run left half written. This must be False if a
    training may be writing to the folder, because its checkpoint would be removed. While the manager is open,
    `sys.unraisablehook` and the log of asyncio are filtered; see `_failed_reads_kept_quiet`.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writing, cleanup_tmp_directories=writing)
    path = folder.writable_folder(CHECKPOINTS) if writing else folder / CHECKPOINTS
    path = path.resolve() if folder.is_local else path
    with _failed_reads_kept_quiet(), contextlib.closing(ocp.CheckpointManager(path, options=options)) as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, state: Any, selected: Any, notes: dict[str, Any]) -> None:
    """Start writing a checkpoint, which counts once it is complete; an existing checkpoint of the step is kept."""
    if step in manager.all_steps():
        return
    watchdog.sign("save", f"it began to write the checkpoint of step {step}")
    digests = {"state": _digests(state), "selected": _digests(selected)}
    manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            selected=ocp.args.StandardSave(selected),
            notes=ocp.args.JsonSave(notes),
            digests=ocp.args.JsonSave(digests),
        ),
    )


def restore_newest(manager: ocp.CheckpointManager, *, selected: Any, state: Any = None) -> Restored | None:
    """Restore the newest good checkpoint, with the shapes and shardings of `selected` and `state`.

    A damaged checkpoint is reported and the one before it is tried. If `state` is given, training resumes from the
    restored checkpoint, and damaged ones after it are deleted, since Orbax only saves steps beyond all that exist.
    Returns None if there are no checkpoints. Raises UserError if all of them are damaged.
    """
    watchdog.sign("restore", "it began to restore a checkpoint")
    steps = distributed.broadcast_from_first(sorted(manager.all_steps(), reverse=True))
    for step in steps:
        wanted = {"selected": selected} | ({} if state is None else {"state": state})
        args = {name: ocp.args.StandardRestore(_abstract(tree)) for name, tree in wanted.items()}
        plain = {name: ocp.args.JsonRestore() for name in ("notes", "digests")}
        items, damage = None, ""
        try:
            items = manager.restore(step, args=ocp.args.Composite(**args, **plain))
            changed = [
                f"{name}: {leaf}"
                for name in wanted
                for leaf, digest in _digests(items[name]).items()
                if items["digests"][name].get(leaf) != digest
            ]
            if changed:
                raise ValueError(f"{len(changed)} arrays differ from the saved ones, the first is {changed[0]}")
        except Exception as error:  # Orbax raises a bare Exception if an array on several devices cannot be read
            reason = error.__cause__ or error
            damage = (str(reason) or type(reason).__name__).splitlines()[0].partition(" [tensorstore_spec")[0]
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                gc.collect()  # otherwise Python would warn about these objects at exit
        # No process uses a checkpoint that one of them cannot read.
        if damages := [damage for damage in distributed.gather(damage) if damage]:
            status(f"checkpoint {step} is damaged and was skipped: {damages[0]}")
            continue
        for damaged in steps[: steps.index(step)] if state is not None else ():
            manager.delete(damaged)
        return Restored(step, items["selected"], items["notes"], items["state"] if state is not None else None)
    if steps:
        raise UserError(f"every checkpoint in {manager.directory} is damaged ({', '.join(map(str, steps))})")
    return None


def newest_notes(manager: ocp.CheckpointManager) -> dict[str, Any]:
    """Return the notes of the newest checkpoint; {} if there is none, or its notes cannot be read."""
    step = manager.latest_step()
    if step is None:
        return {}
    try:
        return manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))["notes"]
    except (ValueError, OSError, KeyError):
        return {}


@contextlib.contextmanager
def _failed_reads_kept_quiet() -> Iterator[None]:
    """Suppress the tracebacks of pending reads after another read has failed.

    Orbax closes its event loop at the first array that it cannot read, and raises. TensorStore still reads the other
    arrays and notifies the closed loop later, and the coroutines that wait for them never finish. Until the end of the
    block, `sys.unraisablehook` is replaced and the log of asyncio is filtered; unrelated messages pass.
    """
    show, asyncio_log = sys.unraisablehook, logging.getLogger("asyncio")

    def show_others(what: Any) -> None:
        unfinished = "orbax" in getattr(getattr(what.object, "cr_code", None), "co_filename", "")
        if not (unfinished or str(what.exc_value) == "Event loop is closed"):
            show(what)

    def log_others(record: logging.LogRecord) -> bool:
        return not record.getMessage().partition("\n")[0].endswith("exception was never retrieved")

    sys.unraisablehook = show_others
    asyncio_log.addFilter(log_others)
    try:
        yield
    finally:
        sys.unraisablehook = show
        asyncio_log.removeFilter(log_others)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree)


def _digests(tree: Any) -> dict[str, str]:
    """Return the sha256 of every array as a whole, which does not depend on how the array is sharded."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): hashlib.sha256(
            np.ascontiguousarray(distributed.to_host(leaf)).tobytes()
        ).hexdigest()
        for path, leaf in leaves
    }
