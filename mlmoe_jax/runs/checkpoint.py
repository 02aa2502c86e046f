"""Orbax behind a handful of functions.

A checkpoint has four items: `state` (step, trainable, stats, optimizer, averages: what training goes on from),
`selected` (the values that evaluation and prediction use), `notes` (plain JSON, such as the best metric so far) and
`digests` (a sha256 of every array). Orbax keeps no checksum of array data: flipped bits would come back silently as
other numbers, so a restored checkpoint whose digests differ is passed over in favour of the one before.
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
    """What came back; `state` is None where only the selected values were asked for."""

    step: int
    selected: Any
    notes: dict[str, Any]
    state: Any = None


@contextlib.contextmanager
def open_manager(folder: RunFolder, *, keep: int = 2, writing: bool = True) -> Iterator[ocp.CheckpointManager]:
    """Open the checkpoints of a run folder, of which the newest `keep` stay, and close them at the end.

    writing: make the folder and remove checkpoints that a killed run left half written; if a training may be writing
    to the folder at this moment, that would remove its checkpoint. While the manager is open, `sys.unraisablehook` and
    the log of asyncio are filtered, see `_failed_reads_kept_quiet`.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writing, cleanup_tmp_directories=writing)
    path = folder.writable_folder(CHECKPOINTS) if writing else folder / CHECKPOINTS
    path = path.resolve() if folder.is_local else path
    with _failed_reads_kept_quiet(), contextlib.closing(ocp.CheckpointManager(path, options=options)) as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, state: Any, selected: Any, notes: dict[str, Any]) -> None:
    """Start writing a checkpoint; it counts only once it is complete. A step that is there already is left as it is."""
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
    """Restore the newest good checkpoint into trees like `selected` and `state` (shapes and shardings are theirs).

    A damaged checkpoint is reported and passed over; where training goes on (`state` is given) from an older one it is
    deleted, since Orbax saves no step that is not beyond all that are there. Returns None where there is no checkpoint
    at all; raises UserError where there are some and all are damaged.
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
                raise ValueError(f"{len(changed)} arrays differ from what was saved, the first is {changed[0]}")
        except Exception as error:  # Orbax raises a bare one where an array on several devices cannot be read
            reason = error.__cause__ or error
            damage = (str(reason) or type(reason).__name__).splitlines()[0].partition(" [tensorstore_spec")[0]
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                gc.collect()  # throws away now what Python would throw away, and complain of, as the program ends
        # What one process cannot read, no process goes on from.
        if damages := [damage for damage in distributed.gather(damage) if damage]:
            status(f"checkpoint {step} is damaged and passed over: {damages[0]}")
            continue
        for damaged in steps[: steps.index(step)] if state is not None else ():
            manager.delete(damaged)
        return Restored(step, items["selected"], items["notes"], items["state"] if state is not None else None)
    if steps:
        raise UserError(f"every checkpoint in {manager.directory} is damaged ({', '.join(map(str, steps))})")
    return None


@contextlib.contextmanager
def _failed_reads_kept_quiet() -> Iterator[None]:
    """Keep the reads that are under way when another one fails from printing a traceback each.

    Orbax closes its event loop at the first array that it cannot read, and raises. TensorStore goes on reading the
    others and notifies the closed loop, some time later, and the coroutines that waited for them never finish. Replaces
    `sys.unraisablehook` and filters the log of asyncio until the end of the block; everything else passes.
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
    """Return the sha256 of every array, whole, so that it is the same however the array is spread over devices."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): hashlib.sha256(
            np.ascontiguousarray(distributed.to_host(leaf)).tobytes()
        ).hexdigest()
        for path, leaf in leaves
    }
