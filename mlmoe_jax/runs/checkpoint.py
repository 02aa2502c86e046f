"""Saving and restoring checkpoints with Orbax.

A checkpoint has four items: `state` (step, trainable, stats, optimizer, averages: all that training resumes
from), `selected` (the values for evaluation and prediction), `notes` (plain JSON, such as the best metric so far) and
`digests` (the step, and a sha256 of the notes and of every array). Orbax keeps no checksum of array data, so flipped
bits would be restored silently as other numbers. If the digests of a restored checkpoint differ, or it is the
checkpoint of another step, the one before it is used.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from mlmoe_jax.errors import NoRoom, UserError
from mlmoe_jax.runs.folder import CHECKPOINTS, RunFolder
from mlmoe_jax.runtime import distributed, files, watchdog
from mlmoe_jax.runtime.progress import status

Notes = Mapping[str, Any]
_LAST_WRITES_SECONDS = 60
_SELECTED = {"step": int, "kind": str, "split": str}  # the origin of the selected values, among the notes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Averages:
    """The part of a state that `restore_latest` reads."""

    ema: Any


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint; `state` is None if only the selected values were requested.

    newest: the step of the newest checkpoint, which is damaged if it is not `step`.
    """

    step: int
    newest: int
    selected: Any
    notes: dict[str, Any]
    state: Any = None


@contextlib.contextmanager
def open_manager(folder: RunFolder, *, keep: int = 2, writing: bool = True) -> Iterator[ocp.CheckpointManager]:
    """Open the checkpoints of a run folder, of which the newest `keep` are kept, and close them at the end.

    writing: make the folder, and remove checkpoints that a killed run left half written. This must be False if a
    training may be writing to the folder, because its checkpoint would be removed. While the manager is open,
    `sys.unraisablehook` and the logs of asyncio and absl are filtered; see `_failures_kept_quiet`. Raises NoRoom if a
    checkpoint could not be written, after its partial files have been removed.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writing, cleanup_tmp_directories=writing)
    path = folder.writable_folder(CHECKPOINTS) if writing else folder / CHECKPOINTS
    path = path.resolve() if folder.is_local else path
    with _failures_kept_quiet():
        try:
            with files.full_disk_explained(path):
                manager = ocp.CheckpointManager(path, options=options)
        except RecursionError as error:  # of the JSON in it; Orbax ignores other damage there
            raise UserError(
                f"a _CHECKPOINT_METADATA in {path} is damaged; remove the checkpoint that has it"
            ) from error
        try:
            try:
                yield manager
            finally:
                _close(manager)
        except NoRoom:
            if writing:
                _remove_partial(path)
            raise


def _close(manager: ocp.CheckpointManager) -> None:
    """Wait for the last checkpoint and end the threads of the manager, also if the checkpoint could not be written."""
    try:
        with files.full_disk_explained(manager.directory):
            manager.close()
    except NoRoom:
        manager.close()  # the first call ends at the error, which is raised once, and leaves threads behind
        raise


def _remove_partial(path: epath.Path) -> None:
    """Remove the files of a checkpoint that could not be written."""
    for thread in threading.enumerate():  # after the first error, Orbax does not wait for the other writers
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, _LAST_WRITES_SECONDS)  # theirs raises the error of the thread
    for partial in path.glob("*.orbax-checkpoint-tmp*"):
        partial.rmtree()


def require_written(manager: ocp.CheckpointManager, *, wait: bool = False) -> None:
    """Raise NoRoom if the last checkpoint could not be written; without `wait`, one that is being written counts."""
    if wait or not manager.is_saving_in_progress():
        with files.full_disk_explained(manager.directory):
            manager.wait_until_finished()


def save(manager: ocp.CheckpointManager, step: int, state: Any, selected: Any, notes: dict[str, Any]) -> None:
    """Start writing a checkpoint, which counts once it is complete; an existing checkpoint of the step is kept."""
    if step in manager.all_steps():
        return
    watchdog.sign("save", f"it began to write the checkpoint of step {step}")
    digests = {"step": step, "notes": _digest_of_notes(notes), "state": _digests(state), "selected": _digests(selected)}
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        selected=ocp.args.StandardSave(selected),
        notes=ocp.args.JsonSave(notes),
        digests=ocp.args.JsonSave(digests),
    )
    with files.full_disk_explained(manager.directory):
        manager.save(step, args=items)


def restore_newest(
    manager: ocp.CheckpointManager,
    *,
    selected: Any,
    state: Any = None,
    check: Callable[[Notes], Any] = dict,
) -> Restored | None:
    """Restore the newest good checkpoint, with the shapes and shardings of `selected` and `state`.

    A damaged checkpoint is reported and the one before it is tried. If `state` is given, training resumes from the
    restored checkpoint, and damaged ones after it are deleted, since Orbax only saves steps beyond all that exist.
    check: reads the notes; a checkpoint for which it raises is damaged. Returns None if there are no checkpoints.
    Raises UserError if all of them are damaged.
    """
    steps = distributed.broadcast_from_first(sorted(manager.all_steps(), reverse=True))
    wanted = {"selected": selected} | ({} if state is None else {"state": state})
    restored = _first_good(manager, steps, wanted, check)
    if restored is not None and state is not None:
        for damaged in steps[: steps.index(restored.step)]:
            manager.delete(damaged)
    return restored


def restore_latest(
    manager: ocp.CheckpointManager, *, averages: Any, check: Callable[[Notes], Any] = dict
) -> Restored | None:
    """Restore the moving averages of the newest good checkpoint as its selected values; otherwise `restore_newest`.

    Without moving averages in training they are the parameters themselves.
    """
    steps = distributed.broadcast_from_first(sorted(manager.all_steps(), reverse=True))
    return _first_good(manager, steps, {"state": _Averages(averages)}, check)


def restore_step(
    manager: ocp.CheckpointManager, step: int, *, selected: Any, check: Callable[[Notes], Any] = dict
) -> Restored:
    """Restore the selected values of the checkpoint of a step; UserError if there is none, or it is damaged."""
    steps = distributed.broadcast_from_first(sorted(manager.all_steps()))
    if step not in steps:
        raise UserError(f"{manager.directory} has checkpoints of steps {', '.join(map(str, steps))}, not of {step}")
    return _first_good(manager, [step], {"selected": selected}, check)


def _first_good(
    manager: ocp.CheckpointManager, steps: Sequence[int], wanted: dict[str, Any], check: Callable[[Notes], Any]
) -> Restored | None:
    """Restore the first undamaged checkpoint of `steps`; None without steps, UserError if all are damaged."""
    for step in steps:
        if (items := _restore_good(manager, step, wanted, check)) is None:
            continue
        state, notes = items.get("state"), items["notes"]
        if isinstance(state, _Averages):
            notes = {**notes, "step": step, "kind": "ema", "split": ""}
            return Restored(step, steps[0], state.ema, notes)
        return Restored(step, steps[0], items["selected"], notes, state)
    if steps:
        raise UserError(f"every checkpoint in {manager.directory} is damaged ({', '.join(map(str, steps))})")
    return None


def _restore_good(
    manager: ocp.CheckpointManager, step: int, wanted: dict[str, Any], check: Callable[[Notes], Any]
) -> dict[str, Any] | None:
    """Restore the items `wanted` and the notes of one checkpoint; None, with a message, if it is damaged.

    No process uses a checkpoint that one of them cannot read.
    """
    watchdog.sign("restore", "it began to restore a checkpoint")
    args = {name: _restore_args(tree) for name, tree in wanted.items()}
    plain = {name: ocp.args.JsonRestore() for name in ("notes", "digests")}
    items, damage = None, ""
    try:
        restored = manager.restore(step, args=ocp.args.Composite(**args, **plain))
        items = {name: restored[name] for name in (*wanted, "notes")}
        _require_undamaged(step, items, restored["digests"])
        check(items["notes"])
    except Exception as error:  # Orbax raises a bare Exception if an array on several devices cannot be read
        reason = error.__cause__ or error
        damage = (str(reason) or type(reason).__name__).splitlines()[0].partition(" [tensorstore_spec")[0]
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            gc.collect()  # otherwise Python would warn about these objects at exit
    if damages := [damage for damage in distributed.gather(damage) if damage]:
        status(f"checkpoint {step} is damaged and was skipped: {damages[0]}")
        return None
    return items


def _require_undamaged(step: int, items: dict[str, Any], digests: dict[str, Any]) -> None:
    """Raise ValueError if the items of a checkpoint are not those that were saved.

    Checkpoints of earlier versions have digests of their arrays only.
    """
    if (recorded := digests.get("step", step)) != step:
        raise ValueError(f"it is the checkpoint of step {recorded}")
    notes = items["notes"]
    if not isinstance(notes, dict):
        raise ValueError("its notes are not an object")
    if digests.get("notes", _digest_of_notes(notes)) != _digest_of_notes(notes):
        raise ValueError("its notes differ from the saved ones")
    arrays = {name: tree for name, tree in items.items() if name != "notes"}
    changed = [
        f"{name}: {leaf}"
        for name, tree in arrays.items()
        for leaf, digest in _digests(tree).items()
        if digests[name].get(leaf) != digest
    ]
    if changed:
        raise ValueError(f"{len(changed)} arrays differ from the saved ones, the first is {changed[0]}")
    recorded = getattr(arrays.get("state"), "step", step)  # of checkpoints whose digests have no step too
    if int(recorded) != step:
        raise ValueError(f"it is the checkpoint of step {int(recorded)}")


def selected_of(notes: Notes) -> dict[str, Any]:
    """Return step, kind and split of the selected values from the notes of a run's checkpoint.

    Raises ValueError if one is missing or is of another type.
    """
    for name, kind in _SELECTED.items():
        if not isinstance(notes.get(name), kind):
            raise ValueError(f"its notes give {name} as {notes.get(name)!r}")
    return {name: notes[name] for name in _SELECTED}


def newest_notes(folder: RunFolder, check: Callable[[Notes], Any] = dict) -> dict[str, Any]:
    """Return the notes of the newest checkpoint with undamaged ones, for which `check` passes; {} without any.

    Orbax takes no part: all processes of a job would have to call it together.
    """
    path = folder / CHECKPOINTS
    steps = [int(entry.name) for entry in path.iterdir() if entry.name.isdecimal()] if path.is_dir() else []
    for step in sorted(steps, reverse=True):
        with contextlib.suppress(UserError, ValueError, OSError, KeyError, TypeError, AttributeError):
            place = f"{CHECKPOINTS}/{step}"
            notes, digests = (folder.read_json(f"{place}/{item}/metadata") for item in ("notes", "digests"))
            _require_undamaged(step, {"notes": notes}, digests)
            check(notes)
            return notes
    return {}


@contextlib.contextmanager
def _failures_kept_quiet() -> Iterator[None]:
    """Suppress the tracebacks that follow an error which is also raised.

    Orbax closes its event loop at the first array that it cannot read, and raises. TensorStore still reads the other
    arrays and notifies the closed loop later, and the coroutines that wait for them never finish. Each thread that
    cannot write because the disk is full logs its own traceback. Until the end of the block, or of the process if it
    raises NoRoom, `sys.unraisablehook` is replaced and the logs of asyncio and absl are filtered; unrelated messages
    pass.
    """
    show, asyncio_log, absl_log = sys.unraisablehook, logging.getLogger("asyncio"), logging.getLogger("absl")

    def show_others(what: Any) -> None:
        unfinished = "orbax" in getattr(getattr(what.object, "cr_code", None), "co_filename", "")
        if not (unfinished or str(what.exc_value) == "Event loop is closed"):
            show(what)

    def log_others(record: logging.LogRecord) -> bool:
        return not record.getMessage().partition("\n")[0].endswith("exception was never retrieved")

    def not_of_disk(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or files.no_room(error) is None

    def restore() -> None:
        sys.unraisablehook = show
        asyncio_log.removeFilter(log_others)
        absl_log.removeFilter(not_of_disk)

    sys.unraisablehook = show_others
    asyncio_log.addFilter(log_others)
    absl_log.addFilter(not_of_disk)
    try:
        yield
    except NoRoom:
        raise  # what Orbax leaves behind reports when it is destroyed, at the end of the process
    except BaseException:
        restore()
        raise
    restore()


def _restore_args(tree: Any) -> ocp.args.CheckpointArgs:
    abstract = _abstract(tree)
    if isinstance(tree, _Averages):
        further = {"restore_args": ocp.checkpoint_utils.construct_restore_args(abstract), "partial_restore": True}
        return ocp.args.PyTreeRestore(item=abstract, **further)
    return ocp.args.StandardRestore(abstract)


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


def _digest_of_notes(notes: Any) -> str:
    """Return the sha256 of notes, the same before they are stored as JSON and after."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(notes)), sort_keys=True).encode()).hexdigest()
