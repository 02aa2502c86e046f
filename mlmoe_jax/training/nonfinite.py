"""Steps whose loss or gradient is not finite: to find them, to explain them, and to skip a few."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from mlmoe_jax.data.pipeline import rows_of_step
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.training.setup import Job
from mlmoe_jax.training.state import TrainState, copied

_LISTED = 8  # images in a message


class NonfiniteSteps:
    """Ends a training at the first step whose loss or gradient is not finite, and says what is known about it.

    With `train.skip_nonfinite`, the compiled step leaves the state as it was before such a step, and the training only
    ends after more of them. With `train.find_nonfinite`, each step is checked at once, so that the state before it is
    still there to find the first value that is not finite. Otherwise nothing is fetched from the device before a row of
    the log is written, or a checkpoint.
    """

    def __init__(self, job: Job, manager: ocp.CheckpointManager):
        self._job, self._manager = job, manager
        self._allowed, self._finds = job.config.train.skip_nonfinite, job.config.train.find_nonfinite
        self._unseen: list[tuple[int, dict[str, jax.Array]]] = []

    def before(self, state: TrainState) -> TrainState | None:
        """Return a copy of the state before a step, which donates the state, if `after` will need it."""
        return copied(state.replace(frozen={})).replace(frozen=state.frozen) if self._finds else None

    def after(
        self, step: int, metrics: dict[str, jax.Array], before: TrainState | None, batch: Mapping[str, jax.Array]
    ) -> None:
        """Note the metrics of a step; UserError if the state before it was kept and the step is not finite."""
        self._unseen.append((step, metrics))
        if before is None or _is_finite(metrics):
            return
        first = next(not_finite(self._job.steps.train_step.tensors(before, batch)), "none when computed again")
        if not self._allowed:
            raise self._error(step, metrics, f"the first value that is not finite is {first}")
        status(f"step {step} is skipped: the first value that is not finite is {first}")

    def require_few(self, metrics: Mapping[str, Any]) -> None:
        """Raise UserError if a step up to that of `metrics` was not finite, or more than the allowed number were."""
        skipped = int(metrics.get("skipped_steps", 0))
        if skipped > self._allowed or not (self._allowed or _is_finite(metrics)):
            step, found = next(((s, m) for s, m in self._unseen if not _is_finite(m)), self._unseen[-1])
            find = "--config.train.find_nonfinite=True added to the same command names the first such value"
            allowed = f"{skipped} steps are, and train.skip_nonfinite={self._allowed} allows fewer; "
            raise self._error(step, found, f"{allowed if self._allowed else ''}{find}")
        self._unseen.clear()

    def _error(self, step: int, metrics: Mapping[str, jax.Array], further: str) -> UserError:
        config, split = self._job.config, self._job.data.train_split
        rows = rows_of_step(split, batch_size=config.train.batch_size, seed=config.seed, step=step)
        listed = ", ".join(str(split.ids[row]) for row in rows[:_LISTED])
        more = f" and {len(rows) - _LISTED} more" if len(rows) > _LISTED else ""
        rate = float(self._job.steps.learning_rate(step - 1))
        numbers = f"the loss is {float(metrics['loss']):g}"
        if math.isfinite(float(metrics["loss"])):
            numbers = f"the norm of the gradient is {float(metrics['gradient_norm']):g}"
        kept = self._manager.latest_step()
        return UserError(
            f"{numbers} at step {step} (learning rate {rate:g}, images {listed}{more}); {further}; "
            f"{'no checkpoint was written before it' if kept is None else f'the checkpoint of step {kept} is kept'}; "
            "lower config.optim.learning_rate and start in a new --workdir, or let the same command skip such steps "
            "with --config.train.skip_nonfinite=N"
        )


def _is_finite(metrics: Mapping[str, Any]) -> bool:
    return all(math.isfinite(float(metrics[name])) for name in ("loss", "gradient_norm"))


def not_finite(tensors: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Yield the names of the values that are not finite, from pairs of a kind of values and their tree of flags."""
    for kind, tree in tensors:
        for path, finite in jax.tree_util.tree_leaves_with_path(tree):
            if not bool(finite):
                yield f"{kind}{jax.tree_util.keystr(path)}"
