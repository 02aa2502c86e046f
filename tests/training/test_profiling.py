"""The training steps to trace."""

import pytest

from mlmoe_jax.training.profiling import Window


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
