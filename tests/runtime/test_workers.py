"""A pool of processes. They import this module, which therefore imports little."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError

import pytest
from helpers.jobs import until

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.workers import WorkerLost, Workers

MOST = 1 << 30  # bytes


def act(what: str = "", more: int = 0):
    if what == "sleep":
        time.sleep(60)
    if what == "crash":
        os._exit(1)
    if what == "memory":
        bytes(2 * MOST)
    if what == "refuse":
        raise UserError(f"no {more}")
    return os.getpid()


@pytest.fixture
def workers():
    """One process."""
    with contextlib.closing(Workers(act, 1, most_bytes=MOST)) as started:
        yield started


def result(workers: Workers, *arguments) -> int | str:
    """The process of a call, or its error."""
    try:
        return workers.submit(*arguments).result(30)
    except (OSError, UserError, WorkerLost) as error:
        return str(error)


def test_a_process_that_takes_too_long_or_ends_is_replaced(workers, monkeypatch):
    first = result(workers)
    assert result(workers) == first != os.getpid()
    assert result(workers, "refuse", 7) == "no 7"
    assert result(workers) == first, "an error of the function ends no process"
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_seconds", 0.2)
        assert result(workers, "sleep") == "it takes more than 0.2 s"
    assert result(workers, "crash") == "its process has ended"
    assert workers.replaced == 2
    if sys.platform == "linux":
        assert result(workers, "memory") == "its process has ended"
    assert result(workers) not in (first, os.getpid())


def test_a_process_is_replaced_later_if_none_can_be_started(workers, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(workers._workers[0], "_start", lambda: os.open("/missing", os.O_RDONLY))
        assert "has ended" in result(workers, "crash")
        assert "No such file" in result(workers)
    assert result(workers) != os.getpid()
    assert workers.replaced == 1


def test_an_error_of_the_function_tells_where_it_was_raised(workers):
    error = workers.submit("refuse", 7).exception(30)
    assert 'raise UserError(f"no {more}")' in error.__notes__[0]


def test_a_process_leaves_ctrl_c_to_its_parent(workers):
    process = result(workers)
    os.kill(process, signal.SIGINT)
    assert result(workers) == process
    assert workers.replaced == 0


def test_killed_calls_end_and_others_do_not_begin(workers):
    running, waiting = workers.submit("sleep"), workers.submit()
    until(running.running)
    workers.kill()
    with pytest.raises(WorkerLost):
        running.result(30)
    with pytest.raises(CancelledError):
        waiting.result(30)


PROGRAM = """
import contextlib
from runtime.test_workers import Workers, act

if __name__ == "__main__":
    with contextlib.closing(Workers(act, 2)) as workers:
        print(workers.submit().result(), flush=True)
        workers.submit("sleep").result()
"""


def is_running(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_parent(tmp_path, number):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(tmp_path / "program.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.send_signal(number)
    until(lambda: not is_running(worker))
