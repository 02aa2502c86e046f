"""How a training resumes: which keys may change, and where it starts."""

from __future__ import annotations

import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from mlmoe_jax import config as configuration
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.folder import CHECKPOINTS, CONFIG, RESULTS, RunFolder
from mlmoe_jax.runs.history import record_start
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import say
from mlmoe_jax.runtime.sharding import place
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.setup import Job, _copy, _stored_form
from mlmoe_jax.training.state import TrainState

# Keys that may differ when a run goes on: they change where and how fast, not what.
FREE_KEYS = (
    "data.root",
    "data.threads",
    "data.workers",
    "pack.",
    "prune.",
    "init_from",  # what goes on does not start anew
    "train.accumulate",
    "train.log_every",
    "eval.batch_size",
    "checkpoint.",
    "mesh.",
    "log.",
    "metrics.",
    "thresholds.",
    "report.",
)


def start(job: Job, state: TrainState, manager: ocp.CheckpointManager) -> tuple[TrainState, Selection]:
    """Return where training begins: (1) the newest good checkpoint, (2) `config.init_from`, (3) the pretrained
    backbone, (4) scratch. `state` already holds one of (2) to (4).
    """
    selection = Selection(_copy(state.ema))
    like = {"selected": selection.values, "state": state.replace(frozen={})}
    restored = checkpoint.restore_newest(manager, **_stored_form(job, like))
    if restored is not None:
        state = place(restored.state, job.mesh, job.labels).replace(frozen=state.frozen)
        notes = dict(restored.notes)
        job.skipped.rows.update(notes.pop("skipped", ()))
        selection = Selection(place(restored.selected, job.mesh, job.labels), **notes)
        say(f"going on from step {restored.step} of {job.total_steps}")
    if distributed.is_first():
        job.folder.drop_rows_after(int(state.step))
        if int(state.step) < job.total_steps and not selection.finished:
            record_start(job.folder, int(state.step), job.mesh)
    return state, selection


def require_same_config(config: ConfigDict, folder: RunFolder) -> None:
    """Raise UserError where the folder holds a run that was configured otherwise."""
    if changed := changed_keys(config, folder):
        raise UserError(
            f"{folder} holds a run with another config ({'; '.join(changed)}); give its own command to go on, or "
            "another --workdir"
        )


def changed_keys(config: ConfigDict, folder: RunFolder) -> list[str]:
    """Say which keys differ between a config and the one that the folder's run was trained with, if it holds one."""
    if not (folder / CONFIG).exists() or not any((folder / name).exists() for name in (CHECKPOINTS, RESULTS)):
        return []
    before, now = (configuration.flatten(c) for c in (configuration.from_json(folder.read_text(CONFIG)), config))
    return [
        f"{key} was {before[key]!r} and is {now[key]!r}"
        for key in now
        if before[key] != now[key] and not key.startswith(FREE_KEYS)
    ]
