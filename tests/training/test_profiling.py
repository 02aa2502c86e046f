"""The trace of some training steps, and the table of its operations."""

from types import SimpleNamespace

import pytest

from mlmoe_jax.training.profiling import Window, operations, operations_table, sources


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "0:3", "4:3", "a:b", "1:2:3", "-1:2", "1.0:2", "٣:٤", "1:101"])
def test_a_range_that_is_none_is_refused(refusal, text):
    assert refusal(Window.parse, text) == (
        f"--profile={text} should be the first and the last step to trace, such as --profile=10:12; steps count from "
        "1, and at most 100 are traced"
    )


def test_ranges_end_within_the_training_and_begin_after_what_is_done(refusal):
    assert Window.parse("3:5") == Window(3, 5)
    Window(3, 5).require(2, 5)
    for step, total in ((0, 4), (3, 9)):
        assert f"within the remaining steps, {step + 1} to {total}" in refusal(Window(3, 5).require, step, total)


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
    text = operations_table({"dot.1": (0.03, 4), "copy": (0.01, 2)}, 2, sources(program)).text()
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["15.00", "75.0", "%", "2", "dot.1", "jit(step)/attn/dot_general"],
        ["5.00", "25.0", "%", "1", "copy"],
    ]
