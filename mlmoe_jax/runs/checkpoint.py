"""Saving and restoring checkpoints with Orbax.

A checkpoint has four items:

    state     step, trainable, stats, optimizer, averages: everything from which training resumes
    selected  the values for evaluation and prediction
    notes     plain JSON, such as the best metric so far
    digests   the step, and a sha256 of every file, see `digests.py`

Orbax stores no checksum of array data, so it would silently restore flipped bits. If a file differs from its digest, or
the checkpoint belongs to another step, the previous checkpoint is used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from mlmoe_jax.errors import DiskError, UserError
from mlmoe_jax.runs import digests
from mlmoe_jax.runs.folder import CHECKPOINTS, RunFolder
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.files import damage_explained, disk_errors_explained
from mlmoe_jax.runtime.progress import heartbeat, status
from mlmoe_jax.runtime.sharding import copy_tree

_LAST_WRITES_SECONDS = 60


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      newest: the step of the newest checkpoint. If it differs from `step`, the newest checkpoint is damaged.
      notes: the item `notes` of the checkpoint, a dict of plain values.
      selected: the item `selected`; None if it was not requested.
      state: the item `state`, or some of its fields; None if it was not requested.
    """

    step: int
    newest: int
    notes: dict[str, Any]
    selected: Any = None
    state: Any = None


@contextlib.contextmanager
def open_manager(folder: RunFolder, *, keep: int = 2, writing: bool = True) -> Iterator[ocp.CheckpointManager]:
    """Open the checkpoints of a run folder, as a context. At the end, wait until they are written and close them.

    Args:
      keep: the number of checkpoints to keep.
      writing: whether checkpoints will be written. If so, the folder is created, and incomplete checkpoints of a killed
        run are removed. It must be False if a training may be writing to the folder, because its unfinished checkpoint
        would be removed.

    Raises:
      DiskError: a checkpoint could not be written. Its partial files have been removed.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writing, cleanup_tmp_directories=writing)
    path = folder.writable_folder(CHECKPOINTS) if writing else folder.inside(CHECKPOINTS)
    path = path.resolve() if folder.is_local else path
    with damage_explained(f"a _CHECKPOINT_METADATA in {path}"), disk_errors_explained(path):
        manager = ocp.CheckpointManager(path, options=options, handler_registry=_handlers())
    try:
        try:
            yield manager
        finally:
            _close(manager)
    except DiskError:
        if writing:
            _remove_partial(path)
        raise


def _handlers() -> ocp.handlers.CheckpointHandlerRegistry:
    """Return the handlers of the items, in the order in which Orbax finalizes a checkpoint."""
    trees = {name: ocp.PyTreeCheckpointHandler() for name in ("state", "selected")}
    registry = ocp.handlers.create_default_handler_registry(**trees, notes=ocp.JsonCheckpointHandler())
    registry.add(digests.ITEM, digests.Save, digests.Handler())
    return registry


def _close(manager: ocp.CheckpointManager) -> None:
    """Wait until the last checkpoint is written, and end the threads of the manager. They end after an error too."""
    try:
        with disk_errors_explained(manager.directory):
            manager.close()
    except DiskError:
        manager.close()  # the first call raises the error and leaves threads behind
        raise


def _remove_partial(path: epath.Path) -> None:
    """Remove the files of checkpoints that could not be written."""
    for thread in threading.enumerate():  # after one error, Orbax does not wait for its further writers
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, _LAST_WRITES_SECONDS)  # Orbax's own join raises the thread's error
    for partial in path.glob("*.orbax-checkpoint-tmp*"):
        partial.rmtree()


def require_written(manager: ocp.CheckpointManager, *, wait: bool = False) -> None:
    """Raise DiskError if the last checkpoint could not be written.

    A write in progress is awaited if `wait` is True. Otherwise it is not checked.
    """
    if wait or not manager.is_saving_in_progress():
        with disk_errors_explained(manager.directory):
            manager.wait_until_finished()


def save(manager: ocp.CheckpointManager, step: int, state: Any, selected: Any, notes: dict[str, Any]) -> None:
    """Start writing a checkpoint in the background. If the step already has a checkpoint, nothing is written.

    Args:
      state: the state of the training, a tree of arrays.
      selected: the values for evaluation and prediction, a tree of arrays.
      notes: a dict that can be stored as JSON.
    """
    if step in manager.all_steps():
        return
    heartbeat()
    if jax.default_backend() == "cpu":  # the host reads the arrays in place, and the next step would wait for it
        # On simulated devices, transfers that wait can occupy the threads that a collective operation needs.
        state, selected = jax.block_until_ready(copy_tree((state, selected)))
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(state),
        selected=ocp.args.PyTreeSave(selected),
        notes=ocp.args.JsonSave(notes),
        digests=digests.Save(step),
    )
    with disk_errors_explained(manager.directory):
        manager.save(step, args=items)


def restore(
    manager: ocp.CheckpointManager, *, selected: Any = None, state: Any = None, step: int | None = None
) -> Restored | None:
    """Restore the newest undamaged checkpoint; None if there are no checkpoints.

    If a checkpoint is damaged, this is logged, and the preceding checkpoint is tried. If both `selected` and `state`
    are given, a training resumes, and the damaged checkpoints after the restored one are deleted: Orbax saves only
    steps after the last checkpoint.

    Args:
      selected: arrays or ShapeDtypeStructs with the shapes and shardings of the values for evaluation; None: not
        restored.
      state: arrays or ShapeDtypeStructs of the training state, or of some of its fields in a dict; None: not restored.
      step: the only checkpoint to try; None: all checkpoints.

    Raises:
      UserError: all tried checkpoints are damaged, or there is no checkpoint of `step`.
    """
    steps = distributed.broadcast_from_first(sorted(manager.all_steps(), reverse=True))
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps[::-1]))
        raise UserError(f"{manager.directory} has checkpoints of steps {known}, not of {step}")
    tried = steps if step is None else [step]
    items = {name: item for name, item in {"selected": selected, "state": state}.items() if item is not None}
    damaged = []
    for each in tried:
        restored = _restore_undamaged(manager, each, items)
        if restored is not None:
            break
        damaged.append(each)
    if not tried:
        return None
    if damaged == tried:
        raise _damaged(manager, tried, steps)
    if len(items) == 2:
        for each in damaged:
            manager.delete(each)
    return Restored(tried[len(damaged)], tried[0], **restored)


def _damaged(manager: ocp.CheckpointManager, tried: list[int], steps: list[int]) -> UserError:
    """Return the error that the checkpoints `tried` are damaged. `steps` are the steps of all checkpoints."""
    if others := ", ".join(str(each) for each in steps[::-1] if each not in tried):
        return UserError(
            f"checkpoint {tried[0]} in {manager.directory} is damaged; name another one of steps {others}, or leave "
            "--checkpoint out"
        )
    return UserError(
        f"every checkpoint in {manager.directory} is damaged ({', '.join(map(str, tried))}); restore a copy of this "
        "folder, or move it away and train again"
    )


def _restore_undamaged(manager: ocp.CheckpointManager, step: int, items: dict[str, Any]) -> dict[str, Any] | None:
    """Restore items (name -> tree of arrays or ShapeDtypeStructs) and the notes of one checkpoint, as a dict.

    The result is None, on all processes, if the checkpoint is damaged for any of them. Damage is logged.
    """
    heartbeat()
    args = {name: _restore_args(tree) for name, tree in items.items()} | {"notes": ocp.args.JsonRestore()}
    restored, damage = {}, ""
    if distributed.is_first():
        damage = digests.damage(manager.directory / str(step), step, args.keys())
    if not (damage := distributed.broadcast_from_first(damage)):
        try:
            stored = manager.restore(step, args=ocp.args.Composite(**args))
            restored = {name: stored[name] for name in args}
        except Exception as error:  # Orbax raises a bare Exception if an array on several devices cannot be read
            reason = error.__cause__ or error
            damage = (str(reason) or type(reason).__name__).splitlines()[0].partition(" [tensorstore_spec")[0]
    if damages := [damage for damage in distributed.gather(damage) if damage]:
        status(f"checkpoint {step} is damaged and was skipped: {damages[0]}")
        return None
    return restored


def newest_notes(folder: RunFolder) -> dict[str, Any]:
    """Return the newest undamaged notes of the checkpoints in a run folder; {} if there are none.

    The files are read without Orbax, because Orbax would require that all processes call this function together.
    """
    path = folder / CHECKPOINTS
    steps = [int(entry.name) for entry in path.iterdir() if entry.name.isdecimal()] if path.is_dir() else []
    for step in sorted(steps, reverse=True):
        if not digests.damage(path / str(step), step, ("notes",)):
            return folder.read_json(f"{CHECKPOINTS}/{step}/notes/metadata")
    return {}


def _restore_args(tree: Any) -> ocp.args.CheckpointArgs:
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)), tree
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=True)
