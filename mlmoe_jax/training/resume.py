"""Resume a training: compare its config with the stored config, and save and restore its progress."""

from __future__ import annotations

import copy

import orbax.checkpoint as ocp
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.config.table import entry_named
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.folder import RunFolder, stored_config
from mlmoe_jax.runs.starts import record_start
from mlmoe_jax.runtime import distributed, machine
from mlmoe_jax.runtime.keys import ON_RESUME
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.setup import AUTO
from mlmoe_jax.runtime.sharding import copy_tree
from mlmoe_jax.training.experiment import Experiment
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.step import TrainState


# --------------------------------------------------------------------------------------------------------- progress
def save_progress(
    experiment: Experiment, manager: ocp.CheckpointManager, step: int, state: TrainState, selection: Selection
) -> None:
    """Save a checkpoint from which `restore_progress` can resume the training."""
    notes = {**selection.notes(), "skipped": sorted(experiment.data.skipped.everywhere().rows)}
    stored = experiment.steps.stored_form({"state": state.replace(frozen={}), "selected": selection.values})
    checkpoint.save(manager, step, stored["state"], stored["selected"], notes)
    machine.return_freed_memory()


def restore_progress(
    experiment: Experiment, state: TrainState, manager: ocp.CheckpointManager
) -> tuple[TrainState, Selection]:
    """Restore the state from `Steps.start` and the selection from the newest undamaged checkpoint.

    Without a checkpoint, return the initial state and a selection of its values. Rows of metrics.jsonl after the
    restored step are removed. If steps remain, the start of the training is recorded in the run folder. Raises
    UserError if all checkpoints are damaged.
    """
    steps, like = experiment.steps, {"selected": state.latest(), "state": state.replace(frozen={})}
    restored = checkpoint.restore(manager, **steps.stored_form(like))
    if restored is None:
        selection = Selection(copy_tree(state.latest()), experiment.config.eval.select_metric)
    else:
        state = steps.place(restored.state).replace(frozen=state.frozen)
        selection = Selection.from_notes(steps.place(restored.selected), restored.notes)
        if not experiment.data.reordered:
            experiment.data.skipped.rows.update(restored.notes["skipped"])  # numbers of rows
        status(f"resuming from step {restored.step} of {experiment.total_steps}")
    if distributed.is_first():
        experiment.folder.drop_rows_after(int(state.step))
        if int(state.step) < experiment.total_steps and not selection.finished:
            record_start(experiment.folder, int(state.step), steps.mesh)
    return state, selection


# ---------------------------------------------------------------------------------------------------------- configs
def config_of_run(config: ConfigDict, folder: RunFolder) -> ConfigDict:
    """Return the config with which a run in the folder starts or resumes.

    If a run is resumed, dtypes that are `auto` are replaced by the dtypes of the run, because the meaning of `auto`
    depends on the device. Raises UserError if the folder holds a run with a different config.
    """
    config, differences = _compare(config, folder)
    if changed := differences["fixed"]:
        raise UserError(
            f"{folder} was trained with a different config ({'; '.join(changed)}); rerun the original command to "
            "resume, or choose another --workdir, with --init-from to start from this run"
        )
    if reported := differences["reported"]:
        status(f"{'; '.join(reported)}: the results can differ from a run without this change")
    return config


def changed_keys(config: ConfigDict, folder: RunFolder) -> list[str]:
    """Describe the config keys whose change prevents resuming the run in the folder, each as "KEY was OLD and is NEW".

    Returns [] if the run can resume or the folder holds no run.
    """
    return _compare(config, folder)[1]["fixed"]


def _compare(config: ConfigDict, folder: RunFolder) -> tuple[ConfigDict, dict[str, list[str]]]:
    """Compare a config with the config of the run in the folder, if there is a run.

    Returns:
      The config, in which dtypes `auto` are replaced by the dtypes of the run, and {name of ON_RESUME: list with "KEY
      was OLD and is NEW" for each key whose value differs}.
    """
    stored, differences = stored_config(folder), {name: [] for name in ON_RESUME}
    if stored is None:
        return config, differences
    config = copy.deepcopy(config)
    for name in ("dtype", "frozen_dtype"):
        if config.model[name] == AUTO:
            config.model[name] = stored.model[name]
    stored_values, values = configuration.flatten(stored), configuration.flatten(config)
    for key in values | stored_values:
        # Only a term of the loss can be missing in a config; its weight then is 0.
        stored_value, value = stored_values.get(key, 0.0), values.get(key, 0.0)
        if stored_value != value:
            differences[entry_named(key).on_resume].append(f"{key} was {stored_value!r} and is {value!r}")
    return config, differences
