"""Hooks around the training steps: profiler, logging and checks, one class each."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from mlmoe_jax.data.pipeline import rows_of_step
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import MetricLog
from mlmoe_jax.runs.trackers import open_trackers
from mlmoe_jax.runtime import distributed, memory
from mlmoe_jax.runtime.batches import RunAhead
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.training.experiment import Experiment
from mlmoe_jax.training.profiling import FOLDER, Window
from mlmoe_jax.training.step import TrainState, TrainStep

# Largest factor by which the norm of all trainable parameters may grow between two checkpoints.
DIVERGENCE_LIMIT = 1000.0
WRITTEN_SECONDS = 2.0  # between two looks at whether the last checkpoint could be written
_LISTED = 8  # images in a message
_norm = jax.jit(optax.tree.norm)


class Hook:
    """The events of a training, at which hooks do something. By default they do nothing."""

    def before_step(self, step: int, state: TrainState, batch: Mapping[str, jax.Array]) -> None:
        """Called before each step, which donates the buffers of `state`."""

    def after_step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Called after a step is dispatched. `metrics` are still on the device and may not be computed yet."""

    def before_evaluation(self) -> None:
        """Called before the model is evaluated."""

    def after_evaluation(self, row: Mapping[str, float]) -> None:
        """Called after the model is evaluated. `row` maps names of metrics to values."""

    def before_save(self, step: int, state: TrainState) -> None:
        """Called before a checkpoint is saved. Raises UserError if the state must not be saved."""

    def finish(self) -> None:
        """Called after the last step, or after the step at which training was stopped."""

    def close(self) -> None:
        """Called at the end of the training, also after an error."""


class Hooks:
    """A list of hooks, which a `with` block closes. `hooks.after_step(…)` calls `after_step` of each hook, in order."""

    def __init__(self, hooks: Sequence[Hook]):
        self.hooks = hooks

    def __getattr__(self, event: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            for hook in self.hooks:
                getattr(hook, event)(*arguments)

        return call

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as stack:
            for hook in self.hooks:
                stack.callback(hook.close)


def training_hooks(
    experiment: Experiment, state: TrainState, manager: ocp.CheckpointManager, progress: Progress, *, finished: bool
) -> Hooks:
    """Return the hooks of a training that starts or resumes at `state`.

    `finished` tells whether early stopping has ended the training, so that no more steps follow.
    """
    first, steps, folder = int(state.step), experiment.steps, experiment.folder
    unfinished = first < experiment.total_steps and not finished and distributed.is_first()
    trackers = open_trackers(folder, experiment.config, first) if unfinished else ()
    checks = Checks(experiment, manager, state)
    log = MetricLog(folder, steps.learning_rate, experiment.steps_per_epoch, trackers, checks.require_finite)
    trace = Trace(experiment.profile, folder, first=first, total=experiment.total_steps)
    return Hooks([Device(steps.train_step), trace, Log(experiment, log, progress), checks])


class Device(Hook):
    """A hook that prints the memory of the compiled step, and keeps the host at most two steps ahead of the device."""

    def __init__(self, step: TrainStep):
        self._step, self._ahead, self._described = step, RunAhead(), False

    def before_step(self, step, state, batch):
        if not (self._described or jax.config.jax_disable_jit):
            status(memory.describe_memory("a training step", self._step.compile(state, batch)))
        self._described = True

    def after_step(self, step, metrics):
        self._ahead.add(metrics)


class Trace(Hook):
    """A hook that records the steps of `window` (None = no steps) with the JAX profiler, on the first process only.

    Raises:
      UserError: `window` is not within the remaining steps of the training, or the run folder is in an object store.
    """

    def __init__(self, window: Window | None, folder: RunFolder, *, first: int, total: int):
        self._folder = folder
        self._window = window if distributed.is_first() else None
        self._running = contextlib.ExitStack()
        if window is not None:
            window.require(first, total)
            if not folder.is_local:
                raise UserError(f"--profile needs a local run folder, and {folder} is in an object store")

    def before_step(self, step, state, batch):
        if self._window is not None and step == self._window.first:
            jax.block_until_ready((state, batch))  # results of former steps
            jax.profiler.start_trace(str(self._folder.writable_folder(FOLDER)))
            self._running.callback(jax.profiler.stop_trace)

    def after_step(self, step, metrics):
        window = self._window
        if window is not None and step == window.last:
            jax.block_until_ready(metrics)
            self._running.close()
            status(f"trace of steps {window.first} to {window.last}: {self._folder / FOLDER} (open it with xprof)")

    def close(self):
        self._running.close()


class Log(Hook):
    """A hook that shows the progress, and logs the metrics of a step while the device computes the next."""

    def __init__(self, experiment: Experiment, log: MetricLog, progress: Progress):
        self._experiment, self._log, self._progress = experiment, log, progress
        self._pause = contextlib.ExitStack()

    def after_step(self, step, metrics):
        self._log.write()
        if step % self._experiment.config.train.log_every == 0 or self._experiment.evaluates(step):
            self._log.note(step, metrics, self._progress)
        self._progress.advance(self._log.summary)

    def before_evaluation(self):
        self._pause.enter_context(self._progress.paused())

    def after_evaluation(self, row):
        self._pause.close()
        self._log.add(row)

    def before_save(self, step, state):
        self._log.store()  # a run that resumes from the checkpoint has all earlier rows

    def finish(self):
        self._log.write()

    def close(self):
        self._log.close()


class Checks(Hook):
    """A hook that raises UserError if the training diverges or its checkpoints cannot be written.

    Checks:

    1. The loss and the gradient of each step are finite. `train.skip_nonfinite` is the number of steps that may violate
       this. If it is above 0, such a step leaves the parameters unchanged. This check causes no additional transfers
       from the device.
    2. The norm of the trainable parameters at a checkpoint is at most DIVERGENCE_LIMIT · max(1, norm at the previous
       checkpoint). Otherwise the checkpoint is not saved. This finds updates that are too large although the
       loss is finite.
    """

    def __init__(self, experiment: Experiment, manager: ocp.CheckpointManager, state: TrainState):
        self._experiment, self._manager = experiment, manager
        self._saved = int(state.step), float(_norm(state.trainable))
        self._looked = -math.inf
        self._unseen: list[tuple[int, Mapping[str, jax.Array]]] = []
        self._last: Mapping[str, jax.Array] = {}

    def after_step(self, step, metrics):
        if time.monotonic() - self._looked > WRITTEN_SECONDS:
            checkpoint.require_written(self._manager)
            self._looked = time.monotonic()
        self._unseen.append((step, metrics))
        self._last = metrics

    def before_evaluation(self):
        self.require_finite(self._last)

    def before_save(self, step, state):
        self.require_finite(self._last)
        norm, (saved, saved_norm) = float(_norm(state.trainable)), self._saved
        growth = norm / max(1.0, saved_norm)
        if not growth <= DIVERGENCE_LIMIT:
            raise UserError(
                f"the norm of the parameters has grown {growth:.3g} times between steps {saved} and {step}; this state "
                "is not saved, and earlier checkpoints are kept; lower config.optim.learning_rate and start in a "
                "new --workdir"
            )
        self._saved = step, norm

    def finish(self):
        checkpoint.require_written(self._manager, wait=True)

    def require_finite(self, metrics: Mapping[str, Any]) -> None:
        """Raise UserError if more than `train.skip_nonfinite` steps had a loss or gradient that is not finite."""
        allowed, skipped = self._experiment.config.train.skip_nonfinite, int(metrics.get("skipped_steps", 0))
        if skipped <= allowed and (allowed or _is_finite(metrics)):
            self._unseen.clear()
            return
        step, diverged = next(((s, m) for s, m in self._unseen if not _is_finite(m)), self._unseen[-1])
        raise UserError(
            f"{self._describe(step, diverged)}; earlier checkpoints are kept; lower config.optim.learning_rate and "
            "start in a new --workdir, or let the same command skip such steps with --config.train.skip_nonfinite=N"
        )

    def _describe(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Return a text about a step: its loss or gradient norm that is not finite, learning rate and images."""
        config, split = self._experiment.config, self._experiment.data.train_split
        options = {"batch_size": config.train.batch_size, "seed": config.seed, "repeat": config.data.repeat_factor}
        rows = rows_of_step(split, step=step, **options)
        images = ", ".join(str(split.ids[row]) for row in rows[:_LISTED])
        rate = float(self._experiment.steps.learning_rate(step - 1))
        value = f"the loss is {float(metrics['loss']):g}"
        if _is_finite(metrics, "loss"):
            value = f"the norm of the gradient is {float(metrics['gradient_norm']):g}"
        return f"{value} at step {step} (learning rate {rate:g}, images {images})"


def _is_finite(metrics: Mapping[str, Any], *names: str) -> bool:
    return all(math.isfinite(float(metrics[name])) for name in names or ("loss", "gradient_norm"))
