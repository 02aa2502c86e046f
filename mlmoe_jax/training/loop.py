"""Run a training: start from an empty run folder or resume from a checkpoint, train, and evaluate."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from safetensors.numpy import save as safetensors_bytes

import mlmoe_jax.config as configuration
from mlmoe_jax.data.label_matrix import few_positives
from mlmoe_jax.data.sources.named_files import find_root
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import Stopped, UserError
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds, split_to_fit
from mlmoe_jax.evaluation.evaluate import score_split
from mlmoe_jax.evaluation.measure import Metrics, list_skipped, measure, measure_and_write
from mlmoe_jax.evaluation.results import Results, SplitScores
from mlmoe_jax.models.layers.dispatch import use_kernels
from mlmoe_jax.models.params import Params, parameter_table
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import preprocess_for
from mlmoe_jax.runs.decisions import write_thresholds
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.mlflow_log import send_results
from mlmoe_jax.runs.restore import require_same_frozen, write_run_metadata
from mlmoe_jax.runs.trackers import require_trackers
from mlmoe_jax.runtime import distributed, memory
from mlmoe_jax.runtime.preemption import stop_requests
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import copy_tree
from mlmoe_jax.training.experiment import Experiment, fits_by_steps, make_experiment
from mlmoe_jax.training.hooks import training_hooks
from mlmoe_jax.training.initialization import find_origin
from mlmoe_jax.training.logistic.fit import fit_classifier, require_only_classifier
from mlmoe_jax.training.profiling import Window
from mlmoe_jax.training.resume import config_of_run, restore_progress, save_progress
from mlmoe_jax.training.selection import Selection, require_metric, selection_split
from mlmoe_jax.training.step import TrainState
from mlmoe_jax.training.training_data import open_training_data


def train(config: ConfigDict, folder: RunFolder, *, profile: Window | None = None) -> Results:
    """Train a model in a run folder and evaluate it, or resume from the checkpoint of the folder. `config` is not
    changed.

    Args:
      profile: the training steps to record with the JAX profiler. Profiling does not change the results.

    Returns:
      split -> metric -> value, as a fraction.

    Raises:
      UserError: an error that the user can correct.
      Stopped: after SIGTERM or Ctrl-C, once the state is saved.
    """
    config = checked_config(config, folder)
    origin = find_origin(config, folder)
    by_steps = fits_by_steps(config)
    preprocess, mesh = preprocess_for(config), setup_jax(config, training=by_steps)
    data = open_training_data(config, origin)
    status("building the model")
    parts = origin.parts(data.label_space)
    if not by_steps:
        require_only_classifier(parts.trainable, profile)
    status(parameter_table(parts.trainable, parts.frozen).text())
    require_same_frozen(folder, parts)
    options = {"resumes": origin.resumes, "profile": profile}
    experiment = make_experiment(config, folder, data, parts, preprocess, mesh, **options)

    # Of what the optimizer computes.
    precision = jax.default_matmul_precision(config.model.matmul_precision)
    with (
        precision,
        use_kernels(config.model.kernels),
        memory.shortage_explained(memory.TRAINING_ADVICE),
        folder.writing_by_first(),
    ):
        if distributed.is_first():
            data.images.write(folder)
            write_run_metadata(folder, config, data.label_space, preprocess, parts)
        state = experiment.steps.start(parts, resumes=origin.resumes)
        del parts  # its values would occupy memory in addition to the state
        with checkpoint.open_manager(folder, keep=config.checkpoint.keep) as manager:
            state, selection = restore_progress(experiment, state, manager)
            outside = (run_steps if by_steps else fit_classifier)(experiment, state, selection, manager)
        return finish(experiment, selection, state.frozen, outside)


def checked_config(config: ConfigDict, folder: RunFolder) -> ConfigDict:
    """Validate a config and return the copy to train with, which `config_of_run` adapts to a run in the folder.

    All checks that need neither weights nor data are done here. Raises UserError if one fails.
    """
    config = copy.deepcopy(config)  # `setup_jax` resolves types that are `auto`
    require_trainable(config)
    require_trackers(config)
    folder.require_creatable()
    config = config_of_run(config, folder)
    find_root(config.data)
    return config


def require_trainable(config: ConfigDict) -> None:
    """Raise UserError if a model cannot be trained with this config, whatever its data and run folder."""
    configuration.validate(config)
    if config.eval.flips and config.data.cache_features != "no":  # later commands read images
        raise UserError(
            "data.cache_features has no features of mirror images: set data.cache_features=no, or eval.flips=false and "
            "true in later commands"
        )
    require_metric(config)
    preprocess_for(config)


def run_steps(experiment: Experiment, state: TrainState, selection: Selection, manager: ocp.CheckpointManager) -> None:
    """Run all remaining training steps. `selection` is updated in place.

    The order of operations in an iteration is fixed, so that a resumed run gives the same results:

    1. Run the step.
    2. Write the metrics of an earlier step to the log while the device computes.
    3. Evaluate and select, if `experiment.evaluates(step)`.
    4. Write the metrics of this step and save a checkpoint, if `experiment.saves(step)` or the training ends.
    5. Stop, if requested by a signal, which raises Stopped.
    """
    start = step = int(state.step)
    stopping = False
    total, images = experiment.total_steps, experiment.config.train.batch_size
    with contextlib.closing(Progress("train", total, images, start=step)) as progress:
        batches = () if selection.finished else experiment.batches(step, progress)
        hooks = training_hooks(experiment, state, manager, progress, finished=selection.finished)
        with hooks, stop_requests() as request:
            for step, batch in request.until_set(batches):
                hooks.before_step(step, state, batch)
                state, metrics = experiment.steps.train_step(state, batch)
                hooks.after_step(step, metrics)
                if experiment.evaluates(step):
                    hooks.before_evaluation()
                    hooks.after_evaluation(evaluate(experiment, state, selection, step))
                stopping = request.agreed()
                if experiment.saves(step) or selection.finished or stopping:
                    hooks.before_save(step, state)
                    save_progress(experiment, manager, step, state, selection)
                if selection.finished or stopping:
                    break
            else:
                if start < step < total:  # stopped while it waited for a batch
                    hooks.before_save(step, state)
                    save_progress(experiment, manager, step, state, selection)
            hooks.finish()
            if stopping or request.agreed_at_end():  # a request may arrive while the last checkpoint is written
                raise Stopped(f"stopped at step {step} of {total}; the same command resumes from there")


def evaluate(experiment: Experiment, state: TrainState, selection: Selection, step: int) -> dict[str, float]:
    """Evaluate the raw weights and the moving averages on the selection split. `selection` is updated in place.

    Returns "SPLIT/KIND/METRIC" -> value; KIND is `raw` or `ema`. It is empty if there is no selection split.
    """
    candidates = {"raw": state.raw()}
    if experiment.config.ema.decay:
        candidates["ema"] = state.ema
    split = selection_split(experiment.config)
    measured: dict[str, Metrics] = {}
    if split:
        scored = score(experiment, candidates, state.frozen, experiment.data.eval_splits[split])
        label_space = experiment.data.label_space
        measured = {kind: measure(scores, label_space, experiment.config) for kind, scores in scored.items()}
    select(experiment, selection, step, candidates, measured)
    return {f"{split}/{kind}/{name}": value for kind, metrics in measured.items() for name, value in metrics.items()}


def select(
    experiment: Experiment,
    selection: Selection,
    step: int,
    candidates: Mapping[str, Params],
    measured: Mapping[str, Metrics],
) -> None:
    """Update `selection` in place after an evaluation.

    If weights are selected by a metric, the best candidate is selected if its result exceeds all earlier results.
    Otherwise, the last candidate is selected: if `eval.select_on` is "none", or if the selection split has too few
    positives per label.

    Args:
      candidates: kind (`raw`, `ema`) -> values after `step`.
      measured: kind -> metrics on the selection split; {} if there is no selection split.
    """
    config, metric = experiment.config, selection.metric
    split = selection_split(config)
    rough = few_positives(experiment.data.eval_splits[split].labels) if split else ""
    results = {kind: metrics[metric] for kind, metrics in measured.items()}
    if config.eval.select_on == "none" or rough:
        kind = list(candidates)[-1]
        selection.keep(step, kind, "", copy_tree(candidates[kind]))
    else:
        copies = {kind: (result, copy_tree(candidates[kind])) for kind, result in results.items()}
        selection.consider(step, split, copies, patience=config.train.patience * experiment.steps_per_epoch)
    if results:
        percent = ", ".join(f"{kind} {100 * result:.2f}" for kind, result in results.items())
        note = f" (rough, so it selects nothing: {rough})" if rough else ""
        status(f"step {step}, epoch {step / experiment.steps_per_epoch:g}: {split} {metric} {percent} %{note}")
    if selection.finished:
        status(f"stopping early: the best {metric} is more than train.patience={config.train.patience} epochs old")


def finish(experiment: Experiment, selection: Selection, frozen: Params, outside: SplitScores | None = None) -> Results:
    """Evaluate the selected values on all evaluation splits and write the results. Fit thresholds if configured.

    `outside` are the cross-validated scores from `fit_classifier`, written like the scores of a split; None = none.
    Returns split -> metric -> value, as a fraction.
    """
    config, folder, label_space = experiment.config, experiment.folder, experiment.data.label_space
    if outside is None:
        status(f"evaluating the {selection}")
    candidates = {selection.kind: selection.values}
    scored = {
        name: score(experiment, candidates, frozen, split)[selection.kind]
        for name, split in experiment.data.eval_splits.items()
    }
    skipped = [experiment.data.skipped.everywhere(), *(scores.skipped for scores in scored.values())]
    if outside is not None:
        scored[outside.name] = outside
    fitted = None
    if config.thresholds.at_end:
        options = {"categories": label_space.labels_by_category(), "tree": label_space.tree}
        fitted = fit_thresholds(scored[split_to_fit(config)], label_space.names, config, **options)
        status(f"thresholds fitted on {fitted.source['split']}; mlmoe predict uses them")
    backbone = _backbone_file({**selection.values, **frozen}) if config.train.save_backbone else None
    if distributed.is_first():
        if fitted is not None:
            write_thresholds(folder, fitted)
        if backbone is not None:
            folder.write_bytes("backbone.safetensors", backbone)
        list_skipped(folder, skipped)
    results = measure_and_write(folder, scored, label_space, config, fitted=fitted, ends_training=True)
    if distributed.is_first():
        send_results(folder, config, results)
    distributed.barrier("results")  # from here on, every process may read the results
    return results


def score(
    experiment: Experiment, candidates: Mapping[str, Params], frozen: Params, split: Split
) -> dict[str, SplitScores]:
    """Return the scores of a split by kind (`raw`, `ema`) of weights, computed in one pass over its images."""
    steps = experiment.steps
    return score_split(steps.eval_step, candidates, frozen, split, experiment.config, steps.mesh)


def _backbone_file(values: Params) -> bytes:
    """Return the bytes of a safetensors file with the backbone in float16.

    All processes must call it, because arrays may be sharded over them.
    """
    prefix = "backbone/"
    own = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
    return safetensors_bytes({path: np.asarray(value, np.float16) for path, value in distributed.to_host(own).items()})
