"""Training, from an empty run folder to test metrics, or from where a stopped run left off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from safetensors.numpy import save as safetensors_bytes

from mlmoe_jax import config as configuration
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.evaluation.evaluate import list_skipped, report
from mlmoe_jax.evaluation.results import Results
from mlmoe_jax.inference.explain import explain_run
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import MetricLog, require_finite
from mlmoe_jax.runs.restore import describe_run, has_checkpoint, open_run, require_same_frozen
from mlmoe_jax.runs.trackers import open_trackers
from mlmoe_jax.runtime import distributed, memory
from mlmoe_jax.runtime.preemption import asked_to_stop
from mlmoe_jax.runtime.progress import Progress, say
from mlmoe_jax.runtime.sharding import on_device, place
from mlmoe_jax.training.initialization import require_source
from mlmoe_jax.training.resume import require_same_config, start
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.setup import Job, _copy, _stored_form, set_up
from mlmoe_jax.training.state import TrainState


class Stopped(Exception):
    """Training was asked to stop and has saved where it is."""


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


def _backbone_file(values: Params) -> bytes:
    prefix = "backbone/"
    tensors = {
        path.removeprefix(prefix): np.asarray(jax.device_get(value), np.float16)
        for path, value in values.items()
        if path.startswith(prefix)
    }
    return safetensors_bytes(tensors)
