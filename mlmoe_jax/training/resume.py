"""Resuming a training: the comparison of configs, and the restored progress."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.history import record_start
from mlmoe_jax.runs.naming import TOLD_KEYS, is_free
from mlmoe_jax.runs.restore import stored_config
from mlmoe_jax.runtime import distributed, precision
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.setup import Job
from mlmoe_jax.training.state import TrainState, copied


def restore_progress(job: Job, state: TrainState, manager: ocp.CheckpointManager) -> tuple[TrainState, Selection]:
    """Return state and selection from the newest good checkpoint, or the initial ones if there are no checkpoints.

    state: the one before the first step, placed, or `Steps.awaited_state` if there is a checkpoint. Rows of
    metrics.jsonl after the restored step are removed, and the start is recorded. Raises UserError if all checkpoints
    are damaged.
    """
    steps, like = job.steps, {"selected": state.ema, "state": state.replace(frozen={})}
    restored = checkpoint.restore_newest(manager, **steps.stored_form(like), check=_require_progress)
    if restored is None:
        selection = Selection(copied(state.ema), job.config.eval.select_metric)
    else:
        state = steps.place(restored.state).replace(frozen=state.frozen)
        selection = Selection.from_notes(steps.place(restored.selected), restored.notes)
        job.data.skipped.rows.update(restored.notes.get("skipped", ()))
        status(f"resuming from step {restored.step} of {steps.total_steps}")
    if distributed.is_first():
        job.folder.drop_rows_after(int(state.step))
        if int(state.step) < steps.total_steps and not selection.finished:
            record_start(job.folder, int(state.step), steps.mesh)
    return state, selection


def _require_progress(notes: Mapping[str, Any]) -> None:
    """Raise an error unless training can resume from the notes of a checkpoint."""
    Selection.from_notes({}, notes)
    set(notes.get("skipped", ()))


def require_same_config(config: ConfigDict, folder: RunFolder) -> None:
    """Raise UserError if the folder holds a run with a different config; tell differences that are allowed."""
    if changed := changed_keys(config, folder):
        raise UserError(
            f"{folder} was trained with a different config ({'; '.join(changed)}); rerun the original command to "
            "resume, or choose another --workdir"
        )
    if told := [text for key, text in _differences(config, folder).items() if key in TOLD_KEYS]:
        status(f"{'; '.join(told)}: the numbers can differ from those of a run without this change")


def with_values_of_run(config: ConfigDict, folder: RunFolder) -> ConfigDict:
    """Return the config with the held-out images and the types of the run in the folder, if it holds one.

    They stay with a run, as its labels do: earlier versions held out other images, which is told, and other devices
    have other types by default. Keys that are set apply.
    """
    if (stored := stored_config(folder)) is None:
        return config
    if (kept := _split_of_run(config, stored)) and config.data.val_fraction:
        told = "; ".join(f"{key} is {value!r}" for key, value in kept.items())
        status(f"the images that {folder} holds out stay the same: {told}")
    return _with_values(config, stored)


def _split_of_run(config: ConfigDict, stored: ConfigDict) -> dict[str, Any]:
    default = default_config().data
    return {
        f"data.{name}": stored.data[name]
        for name in ("split_rule", "split_seed")
        if config.data[name] == default[name] != stored.data[name]
    }


def _with_values(config: ConfigDict, stored: ConfigDict) -> ConfigDict:
    config = copy.deepcopy(config)
    config.update_from_flattened_dict(_split_of_run(config, stored) | precision.kept(config, stored))
    return config


def changed_keys(config: ConfigDict, folder: RunFolder) -> list[str]:
    """Describe each key that differs from the run in the folder and must not; [] if it holds no run."""
    differences = _differences(config, folder)
    return [text for key, text in differences.items() if key not in TOLD_KEYS and not is_free(key)]


def _differences(config: ConfigDict, folder: RunFolder) -> dict[str, str]:
    """Describe each key whose value differs from the config of the run in the folder; {} if it holds no run."""
    if (stored := stored_config(folder)) is None:
        return {}
    before, now = (configuration.flatten(c) for c in (stored, _with_values(config, stored)))
    # Only terms of the loss can be missing in one of them, where their weight is 0.
    return {
        key: f"{key} was {before.get(key, 0.0)!r} and is {now.get(key, 0.0)!r}"
        for key in now | before
        if before.get(key, 0.0) != now.get(key, 0.0)
    }
