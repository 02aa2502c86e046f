import io
import logging
import os
import sys
import time
from types import SimpleNamespace

import pytest

from mlmoe_jax.runtime import progress as progress_module
from mlmoe_jax.runtime.progress import SPEED_STEPS, DownloadBar, Progress, status


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands at `now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


# --------------------------------------------------------------------------------------------------------- speed
def test_figures_of_speed_and_waiting(clock):
    progress = Progress("train", 10, 32)

    def slow_batches():
        for first in (True, False, False, False):
            clock.now += 50.0 if first else 1.0
            yield "batch"

    for batch in progress.waiting(slow_batches()):
        assert batch == "batch"
        clock.now += 3.0
        progress.advance()
    assert progress.speed() == {"images_per_second": 3 * 32 / 12, "data_wait": 3 / 12}, "without the first step"
    assert progress.speed_text() == "8.0 images/s, 25 % data wait"


def test_figures_are_those_of_recent_steps(clock):
    progress = Progress("train", 1000, 10, start=90)
    for seconds in (*[10.0] * 50, *[0.5] * SPEED_STEPS):
        clock.now += seconds
        progress.advance()
    assert progress.step == 90 + 50 + SPEED_STEPS
    assert progress.speed()["images_per_second"] == 20.0
    assert progress.speed_text() == "20 images/s, 0 % data wait"


def test_a_pause_is_excluded_from_the_figures(clock):
    progress = Progress("train", 10, 32)
    progress.advance()
    with progress.paused():
        clock.now += 100.0
    clock.now += 2.0
    progress.advance()
    assert progress.speed()["images_per_second"] == 32 / 2


# ----------------------------------------------------------------------------------------------------------- lines
def test_without_a_terminal_there_is_a_line_every_5_s_and_later_every_15_s(clock, capsys):
    progress = Progress("train", 100, 2)
    for seconds in (0.0, *[4.0] * 22):
        clock.now += seconds
        progress.advance("loss 0.5")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    speed = "0.5 images/s, 0 % data wait"
    assert lines[0] == f"train 3/100, {speed}, 0:06:28 left loss 0.5", "97 steps of 4 s"
    assert [line.partition("/")[0] for line in lines] == [f"train {step}" for step in (3, 5, 7, 9, 11, 13, 15, 19, 23)]


def test_the_first_line_has_no_figures(clock, capsys):
    progress = Progress("train", 11, 1)
    clock.now += 9000.0
    progress.advance("loss 0.5")
    assert capsys.readouterr().err == "train 1/11 loss 0.5\n"


def test_a_long_first_step_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "EARLY_LINE_SECONDS", 0.01)
    progress = Progress("evaluate val", 4, 1)
    time.sleep(0.2)
    progress.advance()
    assert capsys.readouterr().err.splitlines()[0] == "evaluate val: compiling and reading the first batches"
    monkeypatch.setattr(progress_module, "EARLY_LINE_SECONDS", 0.3)
    quick = Progress("evaluate test", 4, 1)
    quick.advance()
    Progress("evaluate nothing", 0, 1).close()
    assert list(Progress("evaluate an empty split", 0, 1).waiting([])) == []
    time.sleep(0.4)
    assert "compiling" not in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress("evaluate val", 5, 1, start=1)
    progress.advance()
    progress.advance("loss 0.25")
    progress.bar.refresh()
    assert "evaluate val" in terminal.getvalue()
    assert "3/5" in terminal.getvalue()
    assert "% data wait loss 0.25" in terminal.getvalue()
    progress.advance()
    assert progress.note == "loss 0.25", "the last note is kept"
    progress.close()
    assert terminal.getvalue().endswith("\r"), "the bar is removed"


def test_steps_and_downloads_touch_the_heartbeat(monkeypatch, tmp_path):
    file = tmp_path / "heartbeat"
    monkeypatch.setenv("MLMOE_HEARTBEAT", str(file))
    progress, bar = Progress("train", 9, 4), DownloadBar(total=4_000_000)
    assert not file.exists(), "only the supervisor makes it"
    begun = []
    signs = (progress.advance, lambda: bar.update(1), progress.close, lambda: begun.append(Progress("evaluate", 1, 1)))
    for sign in signs:
        file.touch()
        os.utime(file, (1, 1))
        sign()
        assert file.stat().st_mtime > 1
    begun.pop().close()


def test_messages_can_be_silenced(capsys):
    logger = logging.getLogger("mlmoe_jax")
    status("100 % sure")
    assert capsys.readouterr() == ("", "100 % sure\n")
    logger.setLevel("WARNING")
    try:
        status("not now")
    finally:
        logger.setLevel("INFO")
    assert capsys.readouterr() == ("", "")
