"""Checkpoints of a small training state, and damage to them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe_jax.config import default_config
from mlmoe_jax.runs.checkpoint import open_manager, save
from mlmoe_jax.runs.folder import CHECKPOINTS
from mlmoe_jax.training.optim import make_optimizer
from mlmoe_jax.training.step import TrainState, initial_state


def make_state(step: int, *, size: int = 600) -> TrainState:
    """Return a state with that of a real optimizer; every value depends on `step`, and numbers are random bits."""
    draw = np.random.default_rng(step)
    params = {"head/kernel": jnp.zeros((size, 3)), "head/bias": jnp.zeros(3)}
    optimizer = make_optimizer(default_config().optim, 100, params)
    state = initial_state(params, {}, {"norm/mean": jnp.zeros(3)}, optimizer.init(params))

    def fill(value):
        if value.dtype != jnp.float32:
            return jnp.full(value.shape, step, value.dtype)
        return jnp.asarray(np.frombuffer(draw.bytes(value.nbytes), np.float32).reshape(value.shape))

    return jax.tree.map(fill, state).replace(step=jnp.int32(step))


def save_steps(folder, *steps, keep=5):
    with open_manager(folder, keep=keep) as manager:
        for step in steps:
            state = make_state(step)
            save(manager, step, state, state.ema, {"best": {"ema": 0.5}, "step": step})
            manager.wait_until_finished()


def identical(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def damage(folder, step: int, item: str = "state"):
    """Flip one bit in the middle of every file with array data of a checkpoint."""
    files = [file for file in (Path(folder.path) / CHECKPOINTS / str(step) / item).rglob("d/*") if file.is_file()]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
