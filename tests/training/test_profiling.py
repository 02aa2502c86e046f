"""The trace of some training steps, and the table of its operations."""

from types import SimpleNamespace

import pytest

from mlmoe_jax.training.profiling import Window, format_operations, operations, sources


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
