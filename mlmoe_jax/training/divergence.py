"""The guard of the last good checkpoint: a state that has diverged is not saved over it."""

from __future__ import annotations

import math

import jax
import optax

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.params import Params

_norm = jax.jit(optax.tree.norm)


class DivergenceGuard:
    """Compares each state with the one that was saved before it.

    A loss can still be finite when the update that it led to is not sane: a rate that is far too high shows in the
    parameters one step before it shows in the loss. limit: the largest factor by which the norm of all trainable
    parameters may grow from one saved state to the next; 0 = any. Norms below 1 count as 1.
    """

    def __init__(self, limit: float, trainable: Params, step: int):
        self.limit, self._norm, self._step = limit, float(_norm(trainable)), step

    def require_sane(self, step: int, trainable: Params) -> None:
        """Raise UserError unless the parameters after a step may be saved."""
        norm = float(_norm(trainable))
        reason = ""
        if not math.isfinite(norm):
            reason = f"the norm of the parameters is {norm} after step {step}"
        elif self.limit and (growth := norm / max(1.0, self._norm)) > self.limit:
            reason = (
                f"the norm of the parameters has grown {growth:.3g} times between steps {self._step} and {step}, more "
                f"than train.divergence_limit={self.limit:g}"
            )
        if reason:
            raise UserError(
                f"{reason}; this state is not saved, and the checkpoints before it are kept; lower "
                "config.optim.learning_rate and start in a new --workdir"
            )
        self._norm, self._step = norm, step
