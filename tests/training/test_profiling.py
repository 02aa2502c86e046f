"""The trace of some training steps, and the table of its operations."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.profiling import FOLDER, TracedStep, Window, format_operations, operations, sources


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "0:3", "4:3", "a:b", "1:2:3", "-1:2", "1.0:2", "٣:٤"])
def test_a_range_that_is_none_is_refused(refusal, text):
    assert refusal(Window.parse, text) == (
        f"--profile={text} should be the first and the last step to trace, such as --profile=10:12; steps count from 1"
    )


def test_ranges_end_within_the_training_and_begin_after_what_is_done(refusal):
    assert Window.parse("3:5") == Window(3, 5)
    Window(3, 5).require(2, 5)
    assert refusal(Window.parse, "1:101") == "--profile=1:101 are 101 steps; trace at most 100 of them"
    assert refusal(Window(3, 5).require, 0, 4) == "--profile=3:5 is beyond the 4 steps of this training"
    assert refusal(Window(3, 5).require, 3, 9) == (
        "--profile=3:5 begins at a step that is done, since the run resumes from step 3; begin at 4 or later"
    )


class Doubling:
    """A training step that doubles its state, a matrix."""

    def __init__(self):
        self._program = jax.jit(lambda state: jnp.tanh(state @ state) * 2)

    def compile(self, state, batch):
        return self._program.lower(state).compile()

    def __call__(self, state, batch):
        return self._program(state), {"loss": jnp.float32(0)}


def test_the_steps_of_the_range_are_traced_and_their_operations_printed(tmp_path, capsys):
    folder, state = RunFolder(tmp_path), jnp.ones((300, 300))
    step = TracedStep(Doubling(), Window(2, 3), folder, done=0, total=5)
    for number in range(1, 5):
        assert bool(list((tmp_path / FOLDER).rglob("*.xplane.pb"))) == (number == 4)
        state, _ = step(number, state, {})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split() == ["ms", "per", "step", "share", "times", "operation", "from"]
    assert any("dot" in line.rpartition(" ")[2] for line in lines[1:-1]), lines  # where the model calls it
    assert lines[-1].startswith(f"trace of steps 2 to 3: {tmp_path / FOLDER}")
    assert len(lines) <= 12
    step.close()


def test_a_training_that_ends_early_ends_its_trace(tmp_path):
    step = TracedStep(Doubling(), Window(1, 3), RunFolder(tmp_path), done=0, total=5)
    step(1, jnp.ones((3, 3)), {})
    step.close()
    jax.profiler.start_trace(str(tmp_path / "another"))  # fails while one is running
    jax.profiler.stop_trace()


def trace(**lines) -> SimpleNamespace:
    """A trace with events (name, start, duration, stats) by line."""
    events = {
        name: [SimpleNamespace(name=n, start_ns=s, duration_ns=d, stats=stats.items()) for n, s, d, stats in listed]
        for name, listed in lines.items()
    }
    made = [SimpleNamespace(name=name.replace("_", " "), events=found) for name, found in events.items()]
    return SimpleNamespace(planes=[SimpleNamespace(lines=made)])


def test_time_inside_an_operation_counts_for_the_inner_one():
    hlo = {"hlo_op": "x"}
    data = trace(
        host=[("while", 0, 100, hlo), ("dot", 10, 30, hlo), ("dot", 50, 40, hlo), ("Python", 0, 900, {})],
        XLA_Ops=[("dot", 0, 5, {})],
    )
    found = operations(data)
    assert {name: (round(1e9 * seconds), count) for name, (seconds, count) in found.items()} == {
        "while": (30, 1),
        "dot": (75, 3),
    }


def test_the_table_is_per_step_and_names_the_call():
    program = '  %dot.1 = f32[2]{0} dot(%a, %b), metadata={op_type="x" op_name="jit(step)/attn/dot_general"}\n'
    text = format_operations({"dot.1": (0.03, 4), "copy": (0.01, 2)}, 2, sources(program))
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["15.00", "75.0", "%", "2", "dot.1", "jit(step)/attn/dot_general"],
        ["5.00", "25.0", "%", "1", "copy"],
    ]
