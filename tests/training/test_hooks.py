"""The hooks of a training: steps that are not finite, states that have diverged, traces."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import recipe, same_rows

from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training import experiment
from mlmoe_jax.training.hooks import DIVERGENCE_LIMIT, Checks, Hook, Hooks, Trace
from mlmoe_jax.training.loop import train
from mlmoe_jax.training.profiling import FOLDER, Window


def test_hooks_are_called_and_closed_in_order_also_after_an_error():
    calls = []

    class Recorder(Hook):
        def __init__(self, name):
            self.name = name

        def finish(self):
            calls.append(f"finish {self.name}")

        def close(self):
            calls.append(f"close {self.name}")

    with contextlib.suppress(RuntimeError), Hooks([Recorder("a"), Recorder("b")]) as hooks:
        hooks.after_step(1, {})
        hooks.finish()
        raise RuntimeError
    assert calls == ["finish a", "finish b", "close b", "close a"]


# ------------------------------------------------------------------------------------------------- steps not finite
def config_with(**train):
    """A config with these keys of `train`, and a checkpoint per epoch."""
    return recipe("probe", checkpoint__every_epochs=1.0, **{f"train__{name}": value for name, value in train.items()})


@pytest.fixture
def poisoned(monkeypatch):
    """A function that lets the batches of some steps have labels that are NaN, and so a loss that is."""

    def poison(*steps: int):
        def batches(*args, first_step=0, **options):
            for step, batch in enumerate(make(*args, first_step=first_step, **options), start=first_step + 1):
                yield {**batch, "label": batch["label"] * np.float32(np.nan)} if step in steps else batch

        monkeypatch.setattr(experiment, "training_batches", batches)

    make = experiment.training_batches
    return poison


@pytest.mark.slow
@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("log_every", "step", "rows"), [(1, 5, [1, 2, 3, 4]), (100, 2, [])])
def test_the_first_such_step_is_named_also_if_it_is_not_logged(poisoned, tmp_path, refusal, log_every, step, rows):
    poisoned(step)
    sentence = refusal(train, config_with(log_every=log_every), RunFolder(tmp_path))
    assert sentence.startswith(f"the loss is nan at step {step} (learning rate ")
    assert "images train/" in sentence
    assert "earlier checkpoints are kept; lower" in sentence
    assert [row["step"] for row in RunFolder(tmp_path).rows()] == rows


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_few_such_steps_can_be_skipped_and_resumed(poisoned, tmp_path):
    poisoned(2, 5)
    skipping = config_with(skip_nonfinite=2)
    whole = train(skipping, RunFolder(tmp_path / "whole"))
    rows = RunFolder(tmp_path / "whole").rows()
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 1, 2, 2]
    assert [row["loss"] is None for row in rows] == [False, True, False, False, True, False]
    assert rows[1]["learning_rate"] == rows[0]["learning_rate"], "that of the last update"
    half = RunFolder(tmp_path / "half")
    with pytest.raises(UserError, match="at step 5 "):
        train(config_with(skip_nonfinite=1), half)
    assert train(skipping, half) == whole, "resumed from step 3, with a higher limit"
    assert same_rows(half.rows()) == same_rows(rows)


# ------------------------------------------------------------------------------------------------- diverged states
VALUES = {"a": jnp.full(4, 3.0), "b": jnp.full((2, 2), 4.0)}  # norm 10


def state_of(factor: float, step: int = 0) -> SimpleNamespace:
    return SimpleNamespace(step=step, trainable={name: value * factor for name, value in VALUES.items()})


def checks(state: SimpleNamespace) -> Checks:
    writing = SimpleNamespace(is_saving_in_progress=lambda: True)
    hook = Checks(SimpleNamespace(config=default_config()), writing, state)
    hook.after_step(state.step + 1, {"loss": 1.0, "gradient_norm": 1.0})
    return hook


def test_a_state_is_not_saved_whose_norm_has_grown(refusal):
    """Since the state that was saved before; a norm below 1 counts as 1."""
    hook = checks(state_of(1, 3))
    hook.before_save(4, state_of(0.7 * DIVERGENCE_LIMIT))
    hook.before_save(6, state_of((0.7 * DIVERGENCE_LIMIT) ** 2))
    assert refusal(checks(state_of(2, 3)).before_save, 6, state_of(2.1 * DIVERGENCE_LIMIT)) == (
        "the norm of the parameters has grown 1.05e+03 times between steps 3 and 6; this state is not saved, and "
        "earlier checkpoints are kept; lower config.optim.learning_rate and start in a new --workdir"
    )
    near_zero = checks(state_of(1e-9))
    refusal(near_zero.before_save, 1, state_of(0.101 * DIVERGENCE_LIMIT))
    near_zero.before_save(1, state_of(0.099 * DIVERGENCE_LIMIT))
    for bad in (jnp.nan, jnp.inf):
        assert f"has grown {bad} times" in refusal(checks(state_of(1)).before_save, 2, state_of(bad))


# --------------------------------------------------------------------------------------------------------- traces
def test_the_steps_of_the_range_are_traced(tmp_path, capsys):
    state, step = jnp.ones((300, 300)), jax.jit(lambda state: jnp.tanh(state @ state))
    hook = Trace(Window.parse("2:3"), RunFolder(tmp_path), first=1, total=3)
    for number in range(1, 5):
        assert bool(list((tmp_path / FOLDER).rglob("*.xplane.pb"))) == (number == 4)
        hook.before_step(number, state, {})
        state = step(state)
        hook.after_step(number, {"state": state})
    assert capsys.readouterr().err == f"trace of steps 2 to 3: {tmp_path / FOLDER} (open it with xprof)\n"
    hook.close()


@pytest.mark.slow
def test_a_training_that_ends_early_ends_its_trace(tmp_path):
    hook = Trace(Window(1, 3), RunFolder(tmp_path), first=0, total=5)
    hook.before_step(1, jnp.ones((3, 3)), {})
    hook.close()
    jax.profiler.start_trace(str(tmp_path / "another"))  # fails while one is running
    jax.profiler.stop_trace()
