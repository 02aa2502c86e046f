"""A state that has diverged is not saved."""

import jax.numpy as jnp
import pytest

from mlmoe_jax.training.divergence import DivergenceGuard

VALUES = {"a": jnp.full(4, 3.0), "b": jnp.full((2, 2), 4.0)}  # norm 10


def times(factor: float) -> dict:
    return {name: value * factor for name, value in VALUES.items()}


def test_growth_counts_from_the_state_that_was_saved_before():
    guard = DivergenceGuard(8.0, VALUES, 0)
    for step in range(1, 5):
        guard.require_sane(step, times(7.0**step))


def test_growth_beyond_the_limit_is_refused(refusal):
    guard = DivergenceGuard(8.0, VALUES, 3)
    guard.require_sane(4, times(2))
    assert refusal(guard.require_sane, 6, times(16.1)) == (
        "the norm of the parameters has grown 8.05 times between steps 4 and 6, more than train.divergence_limit=8; "
        "this state is not saved, and the checkpoints before it are kept; lower config.optim.learning_rate and start "
        "in a new --workdir"
    )
    guard.require_sane(6, times(15.9))


def test_a_limit_of_0_allows_any_finite_state(refusal):
    guard = DivergenceGuard(0.0, VALUES, 0)
    guard.require_sane(1, times(1e15))
    assert refusal(guard.require_sane, 2, times(1e38)).startswith("the norm of the parameters is inf after step 2;")


def test_parameters_near_zero_may_grow_to_a_norm_of_the_limit(refusal):
    guard = DivergenceGuard(8.0, times(1e-9), 0)
    refusal(guard.require_sane, 1, times(0.81))
    guard.require_sane(1, times(0.79))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_numbers_that_are_not_finite_are_refused(refusal, bad):
    guard = DivergenceGuard(8.0, VALUES, 0)
    assert refusal(guard.require_sane, 2, VALUES | {"b": jnp.full(1, bad)}).startswith(
        f"the norm of the parameters is {float(bad)} after step 2;"
    )
