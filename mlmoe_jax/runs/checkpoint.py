"""Saving and restoring checkpoints with Orbax.

A checkpoint has four items: `state` (step, trainable, stats, optimizer, averages: all that training resumes
from), `selected` (the values for evaluation and prediction), `notes` (plain JSON, such as the best metric so far) and
`digests` (the step, and a sha256 of the notes and of every array). Orbax keeps no checksum of array data, so flipped
bits would be restored silently as other numbers. If the digests of a restored checkpoint differ, or it is the
checkpoint of another step, the one before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from mlmoe_jax.errors import NoRoom, UserError
from mlmoe_jax.runs.folder import CHECKPOINTS, RunFolder
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import damage_explained, full_disk_explained
from mlmoe_jax.runtime.progress import heartbeat, status

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
    """Open the checkpoints of a run folder and close them at the end.

    Args:
      folder: the run folder.
      keep: the number of checkpoints to keep, the newest ones.
      writing: make the folder, and remove checkpoints that a killed run left half written. This must be False if a
        training may be writing to the folder, because its checkpoint would be removed.

    Raises:
      NoRoom: a checkpoint could not be written; its partial files have been removed.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writing, cleanup_tmp_directories=writing)
    path = folder.writable_folder(CHECKPOINTS) if writing else folder / CHECKPOINTS
    path = path.resolve() if folder.is_local else path
    with damage_explained(f"a _CHECKPOINT_METADATA in {path}"), full_disk_explained(path):
        manager = ocp.CheckpointManager(path, options=options)
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
        with full_disk_explained(manager.directory):
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
        with full_disk_explained(manager.directory):
            manager.wait_until_finished()


def save(manager: ocp.CheckpointManager, step: int, state: Any, selected: Any, notes: dict[str, Any]) -> None:
    """Start writing a checkpoint, which counts once it is complete; an existing checkpoint of the step is kept."""
    if step in manager.all_steps():
        return
    heartbeat()
    digests = {"step": step, "notes": _digest_of_notes(notes), "state": _digests(state), "selected": _digests(selected)}
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        selected=ocp.args.StandardSave(selected),
        notes=ocp.args.JsonSave(notes),
        digests=ocp.args.JsonSave(digests),
    )
    with full_disk_explained(manager.directory):
        manager.save(step, args=items)


def restore_newest(
    manager: ocp.CheckpointManager,
    *,
    selected: Any,
    state: Any = None,
    check: Callable[[Notes], Any] = dict,
) -> Restored | None:
    """Restore the newest good checkpoint, with the shapes and shardings of `selected` and `state`.

    A damaged checkpoint is reported and the one before it is tried.

    Args:
      manager: of the checkpoints.
      selected: the values for evaluation, or their shapes.
      state: for a training that resumes. Damaged checkpoints after the restored one are then deleted, since Orbax only
        saves steps beyond all that exist.
      check: reads the notes; a checkpoint for which it raises is damaged.

    Returns:
      None if there are no checkpoints.

    Raises:
      UserError: all checkpoints are damaged.
    """
    steps = distributed.broadcast_from_first(sorted(manager.all_steps(), reverse=True))
    items = {"selected": selected} | ({} if state is None else {"state": state})
    restored = _first_good(manager, steps, items, check)
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
    manager: ocp.CheckpointManager, steps: Sequence[int], items: dict[str, Any], check: Callable[[Notes], Any]
) -> Restored | None:
    """Restore the first undamaged checkpoint of `steps`; None without steps, UserError if all are damaged."""
    for step in steps:
        if (restored := _restore_good(manager, step, items, check)) is None:
            continue
        state, notes = restored.get("state"), restored["notes"]
        if isinstance(state, _Averages):
            return Restored(step, steps[0], state.ema, {**notes, "step": step, "kind": "ema", "split": ""})
        return Restored(step, steps[0], restored["selected"], notes, state)
    if steps:
        raise UserError(f"every checkpoint in {manager.directory} is damaged ({', '.join(map(str, steps))})")
    return None


def _restore_good(
    manager: ocp.CheckpointManager, step: int, items: dict[str, Any], check: Callable[[Notes], Any]
) -> dict[str, Any] | None:
    """Restore the given items and the notes of one checkpoint; None, with a message, if it is damaged.

    No process uses a checkpoint that one of them cannot read.
    """
    heartbeat()
    args = {name: _restore_args(tree) for name, tree in items.items()}
    plain = {name: ocp.args.JsonRestore() for name in ("notes", "digests")}
    restored, damage = {}, ""
    try:
        stored = manager.restore(step, args=ocp.args.Composite(**args, **plain))
        restored = {name: stored[name] for name in (*items, "notes")}
        _require_undamaged(step, restored, stored["digests"])
        check(restored["notes"])
    except Exception as error:  # Orbax raises a bare Exception if an array on several devices cannot be read
        reason = error.__cause__ or error
        damage = (str(reason) or type(reason).__name__).splitlines()[0].partition(" [tensorstore_spec")[0]
    if damages := [damage for damage in distributed.gather(damage) if damage]:
        status(f"checkpoint {step} is damaged and was skipped: {damages[0]}")
        return None
    return restored


def _require_undamaged(step: int, items: dict[str, Any], digests: dict[str, Any]) -> None:
    """Raise ValueError if the items of a checkpoint are not those that were saved."""
    if digests["step"] != step:
        raise ValueError(f"it is the checkpoint of step {digests['step']}")
    if digests["notes"] != _digest_of_notes(items["notes"]):
        raise ValueError("its notes differ from the saved ones")
    changed = [
        f"{name}: {leaf}"
        for name, tree in items.items()
        if name != "notes"
        for leaf, digest in _digests(tree).items()
        if digests[name].get(leaf) != digest
    ]
    if changed:
        raise ValueError(f"{len(changed)} arrays differ from the saved ones, the first is {changed[0]}")


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


def _restore_args(tree: Any) -> ocp.args.CheckpointArgs:
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)), tree
    )
    if isinstance(tree, _Averages):
        further = {"restore_args": ocp.checkpoint_utils.construct_restore_args(abstract), "partial_restore": True}
        return ocp.args.PyTreeRestore(item=abstract, **further)
    return ocp.args.StandardRestore(abstract)


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
