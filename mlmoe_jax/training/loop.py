"""Training, from an empty run folder to test metrics, or from where a stopped run left off."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from ml_collections import ConfigDict
from safetensors.numpy import save as safetensors_bytes

from mlmoe_jax import config as configuration
from mlmoe_jax.data.check import require_sound
from mlmoe_jax.data.labels.space import LabelSpace, label_space_of
from mlmoe_jax.data.pipeline import SkippedImages, build_loader, steps_per_epoch
from mlmoe_jax.data.sources import open_split, original_name
from mlmoe_jax.data.split import UNKNOWN, Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.evaluate import Scored, list_skipped, measure, report, score_split
from mlmoe_jax.inference.explain import explain_run
from mlmoe_jax.models.params import Params, TrainState, initial_state, parameter_table
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.folder import CHECKPOINTS, CONFIG, RESULTS, RunFolder
from mlmoe_jax.runs.history import record_start
from mlmoe_jax.runs.restore import (
    describe_run,
    has_checkpoint,
    label_axes,
    open_run,
    preprocess_for,
    read_run,
    require_same_frozen,
    start_jax,
)
from mlmoe_jax.runs.trackers import open_trackers
from mlmoe_jax.runtime import distributed, memory
from mlmoe_jax.runtime.preemption import asked_to_stop
from mlmoe_jax.runtime.progress import MetricLog, Progress, require_finite, say
from mlmoe_jax.runtime.sharding import LabelAxes, on_device, place, without_padding
from mlmoe_jax.training.initialization import require_source, starting_parts
from mlmoe_jax.training.optim import make_optimizer, make_schedules
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.step import Preprocess, TrainStep, make_eval_step, make_train_step, training_objective

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


Results = dict[str, dict[str, float]]  # split -> metric -> value, as fractions


class Stopped(Exception):
    """Training was asked to stop and has saved where it is."""


@dataclass(frozen=True)
class Job:
    """Everything about a training that does not change while it runs."""

    config: ConfigDict
    folder: RunFolder
    mesh: Mesh
    labels: LabelAxes | None  # how the state lies over the mesh
    train_split: Split
    held_out: dict[str, Split]  # the splits that are evaluated, by name
    watched: str  # the one of them that is evaluated while training; "" = none
    skipped: SkippedImages  # of the training split
    label_space: LabelSpace
    preprocess: Preprocess
    unpublished: frozenset[str]  # the frozen values that only the run folder will hold
    steps_per_epoch: int
    total_steps: int
    learning_rate: Callable
    train_step: TrainStep
    eval_step: Callable

    def score(self, values: Params, frozen: Params, split: Split) -> Scored:
        """Score a split with some values."""
        settings = self.config.eval
        return score_split(self.eval_step, values, frozen, split, self.config.data, settings.batch_size, self.mesh)

    def measure(self, scored: Scored) -> dict[str, float]:
        """Return the metrics of a scored split."""
        return measure(scored, self.label_space, self.config)


def train(config: ConfigDict, folder: RunFolder) -> Results:
    """Train, or go on training, in a run folder; return the metrics of each split, as fractions.

    Raises UserError for what the user can put right, Stopped after SIGTERM or Ctrl-C once the state is saved.
    """
    configuration.validate(config)
    folder.require_place()
    require_same_config(config, folder)
    if not has_checkpoint(folder):
        require_source(config)
    job, state = set_up(config, folder)
    require_same_frozen(folder, state.frozen)
    with memory.shortage_explained(memory.FOR_TRAINING):
        return _train(job, state)


def _train(job: Job, state: TrainState) -> Results:
    config, folder, writer = job.config, job.folder, distributed.is_first()
    with folder.writing() if writer else contextlib.nullcontext():
        if writer:
            describe_run(folder, config, job.label_space, job.preprocess, state.frozen, job.unpublished)
        state = place(state, job.mesh, job.labels)
        with checkpoint.open_manager(folder, keep=config.checkpoint.keep) as manager:
            state, selection = start(job, state, manager)
            selection = run_steps(job, state, selection, manager)
        results = finish(job, selection, state.frozen)
        if config.report.samples:
            explain_run(folder, open_run(folder), count=config.report.samples, side=config.report.sample_side)
        return results


def set_up(config: ConfigDict, folder: RunFolder) -> tuple[Job, TrainState]:
    """Open the data, build the model, its initial state and the steps.

    Nothing is written yet, and the state is not on the mesh yet: whoever trains puts it there.
    """
    mesh = start_jax(config)

    # -------------------------------------------------------------------------------------------------- data
    preprocess = preprocess_for(config)
    train_split = open_split(config.data, config.data.train_split, seed=config.seed)
    label_space = _label_space(config, folder, train_split)
    watched = config.data.test_splits[0] if config.eval.select_on == "test" else config.data.val_split
    held_out = {
        name: open_split(config.data, name, classes=train_split.classes, seed=config.seed)
        for name in dict.fromkeys(filter(None, (watched, *config.data.test_splits)))
    }
    if config.model.head.kind == "cnn_rnn" and (train_split.labels == UNKNOWN).any():
        say("warning: cnn_rnn learns label sequences, in which an unknown label counts as absent")
    for warning in [*configuration.warnings(config), *require_sound(train_split, list(held_out.values()))]:
        say(f"warning: {warning}")
    per_epoch = steps_per_epoch(len(train_split), config.train.batch_size)
    total_steps = config.train.epochs * per_epoch
    say(f"{config.data.name}: {len(train_split):,} training images, {len(label_space.names)} labels")

    # ------------------------------------------------------------------------------------------------- model
    labels = label_axes(config, len(label_space.names), mesh)
    parts = starting_parts(config, label_space, folder)
    say(parameter_table(parts.trainable, parts.frozen))

    # ------------------------------------------------------------------------------------------------- steps
    optimizer = make_optimizer(config.optim, total_steps, parts.trainable)
    learning_rate, _ = make_schedules(config.optim, total_steps)
    objective = training_objective(config, train_split.labels)
    train_step = make_train_step(
        parts.definition,
        objective,
        optimizer,
        preprocess,
        config.augment,
        ema_decay=config.ema.decay,
        seed=config.seed,
        mesh=mesh,
        labels=labels,
        accumulate=config.train.accumulate,
    )
    job = Job(
        config=config,
        folder=folder,
        mesh=mesh,
        labels=labels,
        train_split=train_split,
        held_out=held_out,
        watched=watched,
        skipped=SkippedImages(train_split),
        label_space=label_space,
        preprocess=preprocess,
        unpublished=parts.unpublished,
        steps_per_epoch=per_epoch,
        total_steps=total_steps,
        learning_rate=jax.jit(learning_rate),
        train_step=train_step,
        eval_step=make_eval_step(parts.definition, preprocess, mesh, labels),
    )
    state = initial_state(parts.trainable, parts.frozen, parts.stats, optimizer.init(parts.trainable))
    return job, state


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


def run_steps(job: Job, state: TrainState, selection: Selection, manager: ocp.CheckpointManager) -> Selection:
    """Take all remaining steps. The order within a step matters for an exact resume.

    1. the step; 2. the row of an earlier step, while the device is busy with this one; 3. evaluation and selection;
    4. the row of this step, if anything is saved; 5. the checkpoint; 6. stop, if asked to.
    """
    config, first = job.config, int(state.step)
    evaluate_every = config.eval.every_epochs * job.steps_per_epoch
    save_every = max(1, round(config.checkpoint.every_epochs * job.steps_per_epoch))
    goes_on = first < job.total_steps and not selection.finished
    trackers = open_trackers(job.folder, config, first) if goes_on and distributed.is_first() else ()
    log = MetricLog(job.folder, job.learning_rate, job.steps_per_epoch, trackers)
    progress = Progress("train", job.total_steps, config.train.batch_size, first=first)
    batches = on_device(progress.waiting(_training_batches(job, first)), job.mesh)
    with contextlib.closing(log), asked_to_stop() as asked:
        for step in range(first + 1, job.total_steps + 1):
            if selection.finished:
                break
            batch = next(batches)
            if step == first + 1:
                say(memory.describe("a training step", job.train_step.compile(state, batch)))
            state, metrics = job.train_step(state, batch)
            log.write()
            last = step == job.total_steps
            evaluating = step % evaluate_every == 0 or last
            if step % config.train.log_every == 0 or evaluating:
                log.note(step, metrics, progress)
            progress.advance(log.summary)
            if evaluating:
                with progress.paused():
                    log.add(_evaluate(job, state, selection, step))
            stopping = asked.agreed()
            if step % save_every == 0 or last or selection.finished or stopping:
                log.write()
                require_finite(step, float(metrics["loss"]))
                notes = {**selection.notes(), "skipped": sorted(job.skipped.everywhere().rows)}
                stored = _stored_form(job, {"state": state.replace(frozen={}), "selected": selection.values})
                checkpoint.save(manager, step, stored["state"], stored["selected"], notes)
            if stopping:
                raise Stopped(f"stopped at step {step} of {job.total_steps}; the same command goes on from there")
        log.write()
    progress.close()
    return selection


def finish(job: Job, selection: Selection, frozen: Params) -> Results:
    """Evaluate the selected values on every split that is held out, and write all results."""
    say(f"evaluating the {selection}")
    scored = {name: job.score(selection.values, frozen, split) for name, split in job.held_out.items()}
    results = report(job.folder, scored, job.label_space, job.config)
    skipped = job.skipped.everywhere()
    if distributed.is_first():
        list_skipped(job.folder, [skipped, *(item.skipped for item in scored.values())])
        if job.config.train.save_backbone:
            job.folder.write_bytes("backbone.safetensors", _backbone_file({**selection.values, **frozen}))
    distributed.barrier("results")  # what is in the folder now, every process may read
    return results


# ------------------------------------------------------------------------------------------------------ parts
def _evaluate(job: Job, state: TrainState, selection: Selection, step: int) -> dict[str, float]:
    """Measure raw and averaged weights on the watched split, and let `selection` choose."""
    kinds = {"raw": state.raw()} | ({"ema": state.ema} if job.config.ema.decay else {})
    row, candidates = {}, {}
    for kind, values in kinds.items() if job.watched else ():
        measured = job.measure(job.score(values, state.frozen, job.held_out[job.watched]))
        row |= {f"{job.watched}/{kind}/{name}": value for name, value in measured.items()}
        candidates[kind] = measured["mAP"], values
    if job.config.eval.select_on == "none":
        kind = list(kinds)[-1]
        selection.keep(step, kind, "", _copy(kinds[kind]))
    else:
        selection.consider(step, job.watched, {k: (mean_ap, _copy(v)) for k, (mean_ap, v) in candidates.items()})
        patience = job.config.train.patience
        selection.finished = bool(patience) and selection.rounds_without_gain > patience
    if candidates:
        shown = ", ".join(f"{kind} {100 * mean_ap:.2f}" for kind, (mean_ap, _) in candidates.items())
        say(f"step {step}, epoch {step / job.steps_per_epoch:g}: {job.watched} mAP {shown} %")
    return row


def _training_batches(job: Job, first_step: int) -> Iterator[dict[str, np.ndarray]]:
    loader = build_loader(
        job.config.data,
        job.train_split,
        batch_size=job.config.train.batch_size,
        augment=job.config.augment,
        seed=job.config.seed,
        first_step=first_step,
        process=distributed.process(),
    )
    return job.skipped.watch(loader)


def _stored_form(job: Job, placed: Any) -> Any:
    """Return placed values as checkpoints hold them, whatever the mesh."""
    return without_padding(placed, job.mesh, job.labels)


def _copy(values: Params) -> Params:
    """Copy values that the next step's donation would take away."""
    return jax.tree.map(jnp.copy, values)


def _label_space(config: ConfigDict, folder: RunFolder, train_split: Split) -> LabelSpace:
    """Return the label space of the training split, or that of a run that goes on.

    Groups may be cut otherwise by another version of a library, and a file of word vectors may have changed since: what
    a model was trained with stays with it.
    """
    if not has_checkpoint(folder):
        return label_space_of(train_split, original_name(config.data), config.model, config.seed)
    _, label_space = read_run(folder)
    if label_space.names != tuple(train_split.classes):
        raise UserError(f"{folder} holds a run on other labels than the data has now; train in another --workdir")
    return label_space


def _backbone_file(values: Params) -> bytes:
    prefix = "backbone/"
    tensors = {
        path.removeprefix(prefix): np.asarray(jax.device_get(value), np.float16)
        for path, value in values.items()
        if path.startswith(prefix)
    }
    return safetensors_bytes(tensors)


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


def read_results(folder: RunFolder) -> Results | None:
    """Return the results of a finished training, NaN where a metric is undefined; None where it is not finished."""
    if not (folder / RESULTS).exists():
        return None
    return {
        split: {name: math.nan if value is None else value for name, value in measured.items()}
        for split, measured in folder.read_json(RESULTS).items()
    }
