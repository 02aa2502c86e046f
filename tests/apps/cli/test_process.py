"""How the process of a command starts and ends."""

import logging
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.apps.cli import environment, process
from mlmoe_jax.apps.cli.environment import (
    LARGE_PAGES,
    TUNABLES,
    use_large_pages,
)
from mlmoe_jax.apps.cli.process import explain, quiet_libraries, run_command, run_job, warnings_printed
from mlmoe_jax.errors import DISK_ERROR, DONE, USER_ERROR, UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.distributed import VARIABLES
from mlmoe_jax.runtime.progress import status


# --------------------------------------------------------------------------------------------------------- large pages
@pytest.fixture
def started(tmp_path, monkeypatch):
    """The commands that would replace this process, on a system that gives large pages on request."""
    started = []
    monkeypatch.setattr(environment, "PAGES", tmp_path / "enabled")
    environment.PAGES.write_text("always [madvise] never\n")
    monkeypatch.setenv(TUNABLES, "")  # so that it is restored
    monkeypatch.delenv(TUNABLES)
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # whatever measures the coverage
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "mlmoe_jax.main", "--mode=data", "--json"])
    monkeypatch.setattr(sys, "argv", ["main.py", "--mode=data", "--json"])
    return started


def test_the_process_starts_again_with_large_pages(started):
    use_large_pages()
    assert started == [(sys.executable, [sys.executable, "-m", "mlmoe_jax.main", "--mode=data", "--json"])]
    assert os.environ[TUNABLES] == LARGE_PAGES
    use_large_pages()
    assert len(started) == 1, "once"


@pytest.mark.parametrize(
    "unlike",
    [
        lambda patch: environment.PAGES.unlink(),
        lambda patch: environment.PAGES.write_text("[always] madvise never\n"),
        lambda patch: environment.PAGES.write_text("always madvise [never]\n"),
        lambda patch: patch.setenv(TUNABLES, ""),
        lambda patch: patch.setenv(TUNABLES, "glibc.malloc.arena_max=2"),
        lambda patch: patch.setattr(sys, "argv", ["main.py"]),
        lambda patch: patch.setattr(sys, "argv", ["main.py", "--mode=data"]),  # as in `%run` of a notebook
        lambda patch: patch.setattr(sys, "gettrace", lambda: print),  # a debugger
    ],
)
def test_a_process_that_gains_nothing_or_is_not_its_own_goes_on(started, monkeypatch, unlike):
    unlike(monkeypatch)
    before = os.environ.get(TUNABLES)
    use_large_pages()
    assert not started
    assert os.environ.get(TUNABLES) == before


def test_a_started_process_has_the_same_arguments_and_ends_the_same(tmp_path):
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "program.py").write_text(
        "import os, sys, pathlib\n"
        "from mlmoe_jax import main\n"
        "from mlmoe_jax.apps.cli import environment\n"
        f"environment.PAGES = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "print('begins', flush=True)\n"
        f"name = {TUNABLES!r}\n"
        "main.main = lambda words: print(os.getpid(), os.environ.get(name), words, sys.flags.utf8_mode) or 7\n"
        "main.console()\n"
    )
    # A program that is traced, as for coverage, does not start itself again.
    variables = {name: os.environ[name] for name in os.environ if not name.startswith((TUNABLES, "COVERAGE"))}
    variables["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-X", "utf8", str(tmp_path / "program.py"), "--mode=data", "two words"]
    program = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    output, _ = program.communicate(timeout=60)
    assert output.splitlines() == [
        *("begins", "begins"),
        f"{program.pid} {LARGE_PAGES} ['--mode=data', 'two words'] 1",
    ]
    assert program.returncode == 7


# ---------------------------------------------------------------------------------------------------------------- jobs
@pytest.fixture
def alone(monkeypatch):
    """An environment without other processes."""
    for name in (*VARIABLES, "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)


def _fail(error: BaseException):
    raise error


def test_unshared_work_is_done_by_the_first_process(alone, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = []
    for index in ("1", "0"):
        for name, value in zip(VARIABLES, ("10.0.0.1:5000", "3", index), strict=True):
            monkeypatch.setenv(name, value)
        assert run_job(lambda number=index: done.append(number) or 3, together=False) == 3 * (index == "0")
    assert done == ["0"]


def test_a_job_of_several_writes_no_single_file_of_predictions(alone, monkeypatch, capsys):
    for name, value in zip(VARIABLES, ("10.0.0.1:5000", "3", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert run_command(["predict", "--workdir=demo:photographs", "--images=a.jpg", "--output=a.csv"]) == USER_ERROR
    assert "the 3 processes of a job cannot write one file; give --output=FOLDER/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("there is no such file"), 2, "error: there is no such file\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (KeyboardInterrupt("stopped; half is there"), 130, "stopped; half is there\n"),
        (RuntimeError("connection\nclosed"), 1, "RuntimeError: connection\nclosed\nerror: this or another process"),
    ],
)
def test_a_failing_process_of_a_job_prints_the_reason_and_exits_at_once(monkeypatch, capsys, error, code, said):
    class Ended(BaseException):
        pass

    monkeypatch.setattr(distributed, "find_job", lambda environment: distributed.Job(1, 2, {}))
    monkeypatch.setattr(distributed, "connect", lambda job: None)
    monkeypatch.setattr(process, "results_only_from", lambda first: None)
    monkeypatch.setattr(os, "_exit", lambda code: _fail(Ended(code)))
    with pytest.raises(Ended) as ended:
        run_job(lambda: _fail(error), together=True)
    assert ended.value.args == (code,)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("a mistake of ours"), None, ""),
        (UserError("a\x1b[31m"), USER_ERROR, "error: a\\x1b[31m\n"),
        (OSError(28, "full"), DISK_ERROR, "error: cannot write to the disk: No space left on device; "),
    ],
)
def test_errors_of_users_and_disks_are_explained_and_ours_are_not(capsys, error, code, said):
    assert explain(error) == code
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert bool(shown) == bool(said)


# ----------------------------------------------------------------------------------------------- messages and output
@pytest.fixture
def passed(monkeypatch):
    """What the hook of a process with quiet libraries still shows, for the time of a test."""
    passed = []
    monkeypatch.setattr(sys, "unraisablehook", passed.append)
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    for log in map(logging.getLogger, ("asyncio", "absl")):
        monkeypatch.setattr(log, "filters", list(log.filters))
    quiet_libraries()
    return passed


def test_a_command_prints_the_warnings_of_the_package_and_leaves_the_logger_as_it_was(capsys, caplog, monkeypatch):
    package, module = logging.getLogger("mlmoe_jax"), logging.getLogger("mlmoe_jax.runs.folder")
    with warnings_printed():
        module.warning("100 % sure")
        status("on the way")
        monkeypatch.setattr(distributed, "is_first", lambda: False)
        module.warning("told by the first process")
    assert capsys.readouterr() == ("", "warning: 100 % sure\non the way\n")
    assert not package.handlers
    assert package.propagate
    module.warning("afterwards")
    assert "afterwards" in caplog.messages, "a program that uses the package has it"
    assert "100 % sure" not in caplog.messages, "a handler of the root would print it again"


def test_only_messages_about_errors_that_are_raised_too_are_suppressed(passed, caplog):
    closed, other = (SimpleNamespace(object=None, exc_value=RuntimeError(m)) for m in ("Event loop is closed", "other"))
    for event in (closed, other):
        sys.unraisablehook(event)
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: x")
    logging.getLogger("asyncio").error("something else")
    full = OSError(28, "No space left on device")
    logging.getLogger("absl").error("a thread failed", exc_info=(OSError, full, None))
    assert passed == [other]
    assert caplog.messages == ["something else"]


# ----------------------------------------------------------------------------------------------------- standard output
def test_output_to_a_full_disk_has_a_sentence():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"{sys.executable} -m mlmoe_jax.main --help=optim.b1 > /dev/full"
    done = subprocess.run(["bash", "-c", command], text=True, capture_output=True, env=environment)
    assert done.returncode == DISK_ERROR
    assert done.stderr == (
        "error: cannot write standard output: No space left on device; free disk space and repeat the same command\n"
    )


@pytest.mark.parametrize("end", [lambda: DONE, lambda: _fail(BrokenPipeError())], ids=["at the end", "before"])
def test_a_reader_that_closes_the_output_ends_the_command_without_an_error(monkeypatch, capsys, end):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        patch.setattr(process, "_run", lambda arguments: print("text") or end())
        assert run_command([]) == DONE
        print("later output is discarded", flush=True)
    assert capsys.readouterr().err == ""
