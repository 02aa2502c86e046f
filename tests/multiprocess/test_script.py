"""launch/multiprocess.sh, with a script in place of Python that runs the shell code in $DO."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers.paths import REPOSITORY

SCRIPT = REPOSITORY / "launch" / "multiprocess.sh"
STAND_IN = f"""#!/usr/bin/env bash
case "$1" in
  --version) echo "Python 3.11.99"; exit ;;
  -c) exec {sys.executable} "$@" ;;
  -m) case "$2" in venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit ;; pip) exit ;; esac ;;
esac
trap 'echo "asked to stop"; exit 130' TERM INT
echo "$MLMOE_PROCESS of $MLMOE_PROCESSES at $MLMOE_COORDINATOR with ${{CUDA_VISIBLE_DEVICES-no}} GPUs: $*"
echo "a message" >&2
eval "$DO"
"""


@pytest.fixture
def default_interrupts():
    """Handle Ctrl-C in this process: children of a background job would otherwise inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def script(tmp_path, default_interrupts):
    python = tmp_path / "python3"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def start(*arguments, do="exit 0", **variables) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment |= {"PYTHON": str(python), "MLMOE_VENV": str(tmp_path / "venv"), "DO": do} | variables
        command = ["bash", SCRIPT, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, **pipes)

    return start


def test_every_process_has_a_number_which_prefixes_its_lines(script):
    running = script("3", "--config=a b", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6", do="printf 'no line break'")
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    lines = sorted(out.splitlines())
    [port] = set(re.findall(r"127\.0\.0\.1:(\d+)", out))
    assert 1024 < int(port) < 65536
    for number, gpus in enumerate(("0,1", "2,3", "4,5")):
        line = f"{number} of 3 at 127.0.0.1:{port} with {gpus} GPUs: -m mlmoe_jax.main --config=a b"
        assert lines[2 * number : 2 * number + 2] == [f"[{number}] {line}", f"[{number}] no line break"]
        assert f"[{number}] a message" in err.splitlines()


def test_the_first_failure_ends_all_and_is_the_exit_code(script):
    began = time.monotonic()
    do = '[ "$MLMOE_PROCESS" != 1 ] || exit 7; while true; do sleep 0.1; done'
    running = script("3", do=do, MLMOE_GRACE_SECONDS="1")
    out, err = running.communicate(timeout=60)
    assert running.returncode == 7
    assert "process 1 ended with exit code 7" in err
    assert {"[0] asked to stop", "[2] asked to stop"} <= set(out.splitlines())
    assert time.monotonic() - began < 30


def test_workers_on_parts_go_on_after_one_has_failed(script):
    do = '[ "$MLMOE_PROCESS" != 1 ] || exit 7; sleep 2; echo done'
    running = script("2", "predict", "--images=photos", "--output=labels/", do=do, MLMOE_GRACE_SECONDS="0")
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 7
    assert "[0] done" in out.splitlines()


@pytest.mark.slow
def test_a_process_that_ignores_the_request_to_end_is_killed(script):
    do = '[ "$MLMOE_PROCESS" = 0 ] && exit 3; trap "" TERM; while true; do sleep 0.1; done'
    running = script("2", do=do, MLMOE_GRACE_SECONDS="1")
    running.communicate(timeout=60)
    assert running.returncode == 3


def test_a_second_sigterm_kills_a_job_that_hangs(script):
    running = script("2", do='trap "" TERM; echo hangs; while true; do sleep 0.1; done')
    assert [running.stdout.readline() for _ in range(4)].count("[0] hangs\n") == 1
    for _ in range(2):
        running.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    running.communicate(timeout=30)
    assert running.returncode not in (0, 130)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_all_processes(script, number):
    running = script("2", do="while true; do sleep 0.1; done")
    for _ in range(2):
        assert "of 2 at" in running.stdout.readline()
    running.send_signal(number)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert sorted(out.splitlines()) == ["[0] asked to stop", "[1] asked to stop"]


@pytest.mark.parametrize("count", ["", "0", "-1", "two", "--config=a"])
def test_without_a_number_of_processes_no_process_starts(script, count):
    running = script(count)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert (out, err) == (
        "",
        f'error: "{count}" is not a number of processes; write launch/multiprocess.sh N --config=…\n',
    )
