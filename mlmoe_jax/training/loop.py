"""The training loop: from an empty run folder, or a checkpoint, to test metrics."""

from __future__ import annotations

import contextlib

import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from safetensors.numpy import save as safetensors_bytes

import mlmoe_jax.config as configuration
from mlmoe_jax.data.sources.open import root_of
from mlmoe_jax.data.split import few_positives
from mlmoe_jax.evaluation.evaluate import list_skipped, measure_and_write
from mlmoe_jax.evaluation.fit_thresholds import fit_as_configured, split_to_fit
from mlmoe_jax.evaluation.results import Results, SplitScores
from mlmoe_jax.models.params import Params, parameter_table
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import assemble, evaluated_definition, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import MetricLog
from mlmoe_jax.runs.restore import has_checkpoint, parts_of_run, require_same_frozen, write_run_metadata
from mlmoe_jax.runs.thresholds import Thresholds, write_thresholds
from mlmoe_jax.runs.trackers import open_trackers
from mlmoe_jax.runtime import distributed, machine, memory
from mlmoe_jax.runtime.preemption import asked_to_stop
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.sharding import RunAhead, on_device, setup_jax
from mlmoe_jax.training.divergence import DivergenceGuard
from mlmoe_jax.training.initialization import initial_parts, require_source
from mlmoe_jax.training.nonfinite import NonfiniteSteps
from mlmoe_jax.training.profiling import TracedStep, Window
from mlmoe_jax.training.resume import require_same_config, restore_progress, with_values_of_run
from mlmoe_jax.training.selection import Selection, require_metric
from mlmoe_jax.training.setup import Job, build_steps, open_data, training_batches, with_cached_images, with_features
from mlmoe_jax.training.state import TrainState, copied


class Stopped(Exception):
    """Raised after SIGTERM or Ctrl-C, once the current step is saved."""


def train(config: ConfigDict, folder: RunFolder, *, profile: Window | None = None) -> Results:
    """Train, or resume training, in a run folder; return the metrics of each split, as fractions.

    profile: steps to trace, which changes no results.
    A training starts from the first of these that exists: (1) the newest good checkpoint in the folder, (2)
    `config.init_from`, (3) the pretrained backbone, (4) random values. Raises UserError for errors that the user can
    correct, and Stopped after SIGTERM or Ctrl-C, once the state is saved.
    """
    configuration.validate(config)
    require_metric(config)
    folder.require_place()
    config = with_values_of_run(config, folder)
    require_same_config(config, folder)
    resumes = has_checkpoint(folder)
    if not resumes:
        root_of(config.data)  # before weights, which may have to be downloaded
        require_source(config)

    # -------------------------------------------------------------------------------------------- data, model, steps
    mesh, preprocess = setup_jax(config), preprocess_for(config)
    data = open_data(config, folder, resumes=resumes)
    status("building the model")
    if resumes:  # (1): the frozen weights of the run; its checkpoint is restored below
        parts = parts_of_run(folder, config, data.label_space)
    elif config.init_from:  # (2)
        parts = initial_parts(config, data.label_space)
    else:  # (3), or (4) if model.backbone.weights=none
        parts = assemble(config, data.label_space)
    status(parameter_table(parts.trainable, parts.frozen))
    require_same_frozen(folder, parts.frozen)
    data = with_features(config, data, parts, preprocess, mesh, resumed=folder if resumes else None)
    data = with_cached_images(config, data)
    total_steps = config.train.epochs * data.steps_per_epoch
    evaluated = evaluated_definition(config, parts, data.label_space)
    labels = data.train_split.labels
    steps = build_steps(config, parts, preprocess, mesh, labels, total_steps=total_steps, evaluated=evaluated)
    job = Job(config, folder, data, steps, profile)
    if profile is not None:
        profile.require(0, total_steps)

    # ----------------------------------------------------------------------------------------------------- train
    with memory.shortage_explained(memory.FOR_TRAINING), folder.writing_by_first():
        if distributed.is_first():
            write_run_metadata(folder, config, data.label_space, preprocess, parts.frozen, parts.unpublished)
        state = steps.awaited_state(parts) if resumes else steps.place(steps.initial_state(parts))
        del parts  # its values would occupy memory in addition to those of the state
        with checkpoint.open_manager(folder, keep=config.checkpoint.keep) as manager:
            state, selection = restore_progress(job, state, manager)  # (1)
            selection = run_steps(job, state, selection, manager)
        return finish(job, selection, state.frozen)


def run_steps(job: Job, state: TrainState, selection: Selection, manager: ocp.CheckpointManager) -> Selection:
    """Take all remaining steps. The order within a step matters for an exact resume.

    1. the step; 2. the row of an earlier step, while the device computes this one; 3. evaluation and selection; 4. the
    row of this step, if a checkpoint is due; 5. the checkpoint; 6. stop, if requested.
    """
    config, steps, first, total_steps = job.config, job.steps, int(state.step), job.steps.total_steps
    evaluate_every = config.eval.every_epochs * job.data.steps_per_epoch
    save_every = max(1, round(config.checkpoint.every_epochs * job.data.steps_per_epoch))
    unfinished = first < total_steps and not selection.finished
    trackers = open_trackers(job.folder, config, first) if unfinished and distributed.is_first() else ()
    finite = NonfiniteSteps(job, manager)
    log = MetricLog(job.folder, steps.learning_rate, job.data.steps_per_epoch, trackers, finite.require_few)
    guard = DivergenceGuard(config.train.divergence_limit, state.trainable, first)
    progress = Progress("train", total_steps, config.train.batch_size, first=first)
    batches = training_batches(config, job.data.train_split, job.data.skipped, first_step=first)
    batches = on_device(progress.waiting(batches), steps.mesh)
    take_step = TracedStep(steps.train_step, job.profile, job.folder, done=first, total=total_steps)
    stopping, step, ahead = False, first, RunAhead()
    with contextlib.closing(log), contextlib.closing(take_step), asked_to_stop() as asked:
        for step in range(first + 1, total_steps + 1):
            if selection.finished:
                break
            batch = next(batches)
            if step == first + 1:
                status(memory.describe("a training step", steps.train_step.compile(state, batch)))
            before = finite.before(state)
            state, metrics = take_step(step, state, batch)
            ahead.add(metrics)
            log.write()
            checkpoint.require_written(manager)
            finite.after(step, metrics, before, batch)
            last = step == total_steps
            evaluating = step % evaluate_every == 0 or last
            if step % config.train.log_every == 0 or evaluating:
                log.note(step, metrics, progress)
            progress.advance(log.summary)
            if evaluating:
                finite.require_few(metrics)
                with progress.paused():
                    log.add(_evaluate(job, state, selection, step))
            stopping = asked.agreed()
            if step % save_every == 0 or last or selection.finished or stopping:
                log.write()
                finite.require_few(metrics)
                guard.require_sane(step, state.trainable)
                notes = {**selection.notes(), "skipped": sorted(job.data.skipped.everywhere().rows)}
                stored = steps.stored_form({"state": state.replace(frozen={}), "selected": selection.values})
                checkpoint.save(manager, step, stored["state"], stored["selected"], notes)
                machine.return_freed_memory()
            if stopping:
                break
        log.write()
        checkpoint.require_written(manager, wait=True)  # a request that arrives meanwhile must not be lost
        if stopping or asked.agreed_at_end():
            raise Stopped(f"stopped at step {step} of {total_steps}; the same command resumes from there")
    progress.close()
    return selection


def finish(job: Job, selection: Selection, frozen: Params) -> Results:
    """Evaluate the selected values on every evaluation split, fit thresholds if requested, and write all results."""
    status(f"evaluating the {selection}")
    selected = {selection.kind: selection.values}
    scored = {name: job.score(selected, frozen, split)[selection.kind] for name, split in job.data.eval_splits.items()}
    fitted = _fit_thresholds(job, scored) if job.config.thresholds.at_end else None
    skipped = job.data.skipped.everywhere()
    backbone = _backbone_file({**selection.values, **frozen}) if job.config.train.save_backbone else None
    if distributed.is_first():
        list_skipped(job.folder, [skipped, *(item.skipped for item in scored.values())])
        if backbone is not None:
            job.folder.write_bytes("backbone.safetensors", backbone)
    results = measure_and_write(job.folder, scored, job.data.label_space, job.config, fitted=fitted)
    distributed.barrier("results")  # from here on, every process may read the results
    return results


# ------------------------------------------------------------------------------------------------------ parts
def _evaluate(job: Job, state: TrainState, selection: Selection, step: int) -> dict[str, float]:
    """Evaluate raw and averaged weights on the selection split, and update `selection`."""
    kinds = {"raw": state.raw()} | ({"ema": state.ema} if job.config.ema.decay else {})
    split, metric, row, candidates = job.data.selection_split, selection.metric, {}, {}
    scored = job.score(kinds, state.frozen, job.data.eval_splits[split]) if split else {}
    for kind, scores in scored.items():
        measured = job.measure(scores)
        row |= {f"{split}/{kind}/{name}": value for name, value in measured.items()}
        candidates[kind] = measured[metric], kinds[kind]
    if job.config.eval.select_on == "none":
        kind = list(kinds)[-1]
        selection.keep(step, kind, "", copied(kinds[kind]))
    else:
        patience = job.config.train.patience * job.data.steps_per_epoch
        owned = {kind: (result, copied(values)) for kind, (result, values) in candidates.items()}
        selection.consider(step, split, owned, patience=patience)
    if candidates:
        shown = ", ".join(f"{kind} {100 * result:.2f}" for kind, (result, _) in candidates.items())
        few = few_positives(job.data.eval_splits[split].labels)
        rough = f" (rough: {few})" if few else ""
        status(f"step {step}, epoch {step / job.data.steps_per_epoch:g}: {split} {metric} {shown} %{rough}")
    if selection.finished:
        status(f"stopping early: the best {metric} is more than train.patience={job.config.train.patience} epochs old")
    return row


def _fit_thresholds(job: Job, scored: dict[str, SplitScores]) -> Thresholds:
    """Fit thresholds to the scores of the split that the config names, and write them."""
    fitted = fit_as_configured(scored[split_to_fit(job.config)], job.data.label_space.names, job.config)
    if distributed.is_first():
        write_thresholds(job.folder, fitted)
    status(f"thresholds fitted on {fitted.source['split']}; --mode=predict uses them")
    return fitted


def _backbone_file(values: Params) -> bytes:
    """Return the file of a backbone; every process calls it, because arrays may be sharded over them."""
    prefix = "backbone/"
    own = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
    return safetensors_bytes({path: np.asarray(value, np.float16) for path, value in distributed.to_host(own).items()})
