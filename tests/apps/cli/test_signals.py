"""SIGTERM and Ctrl-C at any time: exit code 130, and no traceback."""

import itertools
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import small_program
from helpers.devices import environment_of
from helpers.paths import REPOSITORY

START = tuple(0.1 * step for step in range(40))  # seconds after the process handles signals
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # they have one handler, so a moment needs one of them


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return small_program.program_in(tmp_path_factory.mktemp("program"))


def handles_signals(process: subprocess.Popen) -> bool:
    """Return whether a process has a handler of SIGTERM: Python itself takes a moment to start."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) & 1 << (signal.SIGTERM - 1))


def stopped(process, number: signal.Signals) -> list[str]:
    """Send a signal; return what was wrong with the end of the process."""
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    wrong = [] if process.returncode == 130 else [f"exit code {process.returncode}"]
    return wrong + [word for word in ("Traceback", "Exception ignored") if word in err]


@pytest.mark.slow
def test_a_signal_in_the_set_up_ends_the_program(tmp_path):
    command, lost = [sys.executable, "-m", "mlmoe_jax.main", "--config=mlvpt_digits"], {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for number, seconds in zip(itertools.cycle(SIGNALS), START, strict=False):
        environment = environment_of(GLIBC_TUNABLES="")
        process = subprocess.Popen(
            [*command, f"--workdir={tmp_path / f'{seconds}'}"], env=environment, cwd=REPOSITORY, **pipes
        )
        while not handles_signals(process):
            time.sleep(0.01)
        time.sleep(seconds)
        if wrong := stopped(process, number):
            lost[number.name, seconds] = wrong
    assert not lost


INTERRUPTED = """
from mlmoe_jax import main

def interrupted(arguments):
    try:
        exec("raise KeyboardInterrupt")  # as in the definition of a dataclass
    except KeyboardInterrupt:
        return 130

main.main = interrupted
main.console()
"""


def test_an_interrupt_in_the_definition_of_a_class_has_the_exit_code_too(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, env=environment_of(GLIBC_TUNABLES=""), cwd=tmp_path, check=False)
    assert done.returncode == 130


@pytest.mark.slow
def test_a_signal_in_the_final_evaluation_ends_the_program(program, tmp_path):
    folder = tmp_path / "run"
    command = ("--config=mlvpt_digits", f"--workdir={folder}", *small_program.SMALL)
    process = program(*command, wait=False)
    lost = {}
    for index in range(10):
        line = next(line for line in process.stderr if "evaluating the" in line)
        assert line
        time.sleep(0.008 * index)  # the results are written after 0.1 s
        if wrong := stopped(process, SIGNALS[index % 2]):
            lost[index] = wrong
        assert not (folder / "results.json").exists()
        process = program(*command, wait=False)
    process.communicate(timeout=120)
    assert not lost
    assert (process.returncode, (folder / "results.json").exists()) == (0, True)
