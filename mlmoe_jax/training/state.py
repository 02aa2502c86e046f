"""The state of a training: parameters, statistics, optimizer state, moving averages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe_jax.models.params import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run after `step` steps.

    stats: values that the forward pass updates instead of the optimizer. opt: the state of the optimizer. ema: moving
    averages of trainable and stats together.
    """

    step: jax.Array
    trainable: Params
    frozen: Params
    stats: Params
    opt: Any
    ema: Params

    def replace(self, **changes) -> TrainState:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def raw(self) -> Params:
        """Return trainable and stats, the counterpart of `ema`."""
        return {**self.trainable, **self.stats}


@jax.jit  # one small program instead of one for each shape
def copied(values: Any) -> Any:
    """Return a copy of a tree of values that survives the donation of the originals in the next step."""
    return jax.tree.map(jnp.copy, values)


def initial_state(trainable: Params, frozen: Params, stats: Params, opt: Any) -> TrainState:
    """Return the state before the first step; the moving averages start at the initial values.

    Every value that a step donates is copied, because a buffer that appears twice cannot be donated.
    """
    trainable, stats, opt, ema = copied((trainable, stats, opt, {**trainable, **stats}))
    return TrainState(jnp.asarray(np.int32(0)), trainable, frozen, stats, opt, ema)
