"""How the process of a command starts and ends."""

import os
import subprocess
import sys

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax import main as program
from mlmoe_jax.apps.cli import large_pages, process
from mlmoe_jax.apps.cli.large_pages import LARGE_PAGES, TUNABLES, use_large_pages
from mlmoe_jax.apps.cli.process import explain, run_job
from mlmoe_jax.errors import DONE, INTERRUPTED, USER_ERROR, NoRoom, UserError
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.distributed import VARIABLES


# --------------------------------------------------------------------------------------------------------- large pages
@pytest.fixture
def started(tmp_path, monkeypatch):
    """The commands that would replace this process, on a system that gives large pages on request."""
    started = []
    monkeypatch.setattr(large_pages, "PAGES", tmp_path / "enabled")
    large_pages.PAGES.write_text("always [madvise] never\n")
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


@pytest.mark.parametrize("setting", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_where_asking_changes_nothing_the_process_goes_on(started, setting):
    if setting is None:
        large_pages.PAGES.unlink()
    else:
        large_pages.PAGES.write_text(setting)
    use_large_pages()
    assert not started
    assert TUNABLES not in os.environ


@pytest.mark.parametrize("own", ["", "glibc.malloc.arena_max=2"])
def test_the_users_own_value_is_kept(started, monkeypatch, own):
    monkeypatch.setenv(TUNABLES, own)
    use_large_pages()
    assert not started
    assert os.environ[TUNABLES] == own


@pytest.mark.parametrize("arguments", [[], ["--mode=data"], ["--mode=data", "--sample"]])
def test_a_program_that_runs_inside_another_does_not_replace_it(started, monkeypatch, arguments):
    """As in `%run -m mlmoe_jax.main --mode=data` of a notebook."""
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    use_large_pages()
    assert not started


def test_a_debugger_keeps_its_process(started, monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    use_large_pages()
    assert not started


def test_a_started_process_has_the_same_arguments_and_ends_the_same(tmp_path):
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "program.py").write_text(
        "import os, sys, pathlib\n"
        "from mlmoe_jax.apps.cli import large_pages\n"
        f"large_pages.PAGES = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "print('begins', flush=True)\n"
        "large_pages.use_large_pages()\n"
        "print(os.getpid(), os.environ[large_pages.TUNABLES], sys.argv[1:], sys.flags.utf8_mode)\n"
        "sys.exit(7)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != TUNABLES}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-X", "utf8", str(tmp_path / "program.py"), "--mode=data", "two words"]
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    output, _ = program.communicate(timeout=60)
    assert output.splitlines() == [
        *("begins", "begins"),
        f"{program.pid} {LARGE_PAGES} ['--mode=data', 'two words'] 1",
    ]
    assert program.returncode == 7


def test_the_command_line_asks_for_large_pages_before_it_runs(monkeypatch):
    done = []
    monkeypatch.setattr(program, "use_large_pages", lambda: done.append("large pages"))
    monkeypatch.setattr(program, "main", lambda arguments: done.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["mlmoe", "--version"])
    with pytest.raises(SystemExit) as ended:
        program.console()
    assert done == ["large pages", ["--version"]]
    assert ended.value.code == 0


# ---------------------------------------------------------------------------------------------------------------- jobs
@pytest.fixture
def alone(monkeypatch):
    """An environment without other processes."""
    for name in (*VARIABLES, "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)


def test_a_single_process_calls_the_function(alone):
    before = sys.stdout
    assert run_job(lambda: 7, together=True) == 7
    assert sys.stdout is before
    with pytest.raises(UserError, match="as it is"):
        run_job(lambda: _fail(UserError("as it is")), together=True)


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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("there is no such file"), 2, "error: there is no such file\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (RuntimeError("connection\nclosed"), 1, "RuntimeError: connection\nclosed\nerror: this process or another one"),
    ],
)
def test_a_failing_process_of_a_job_prints_the_reason_and_exits_at_once(monkeypatch, capsys, error, code, said):
    class Ended(BaseException):
        pass

    monkeypatch.setattr(distributed, "find_job", lambda environment: distributed.Job(1, {}))
    monkeypatch.setattr(distributed, "join", lambda job: None)
    monkeypatch.setattr(process, "results_only_from", lambda first: None)
    monkeypatch.setattr(os, "_exit", lambda code: _fail(Ended(code)))
    with pytest.raises(Ended) as ended:
        run_job(lambda: _fail(error), together=True)
    assert ended.value.args == (code,)
    assert said in capsys.readouterr().err


def test_errors_of_users_disks_and_signals_have_a_sentence_and_a_code(capsys, monkeypatch):
    assert explain(ValueError("a mistake of ours")) is None
    assert capsys.readouterr().err == ""
    assert explain(UserError("a\x1b[31m")) == USER_ERROR
    assert explain(NoRoom("full")) == NoRoom.exit_code
    assert explain(KeyboardInterrupt()) == INTERRUPTED
    assert capsys.readouterr().err == "error: a\\x1b[31m\nerror: full\nstopped\n"
    monkeypatch.setattr(process, "discard_output", lambda: None)
    assert explain(BrokenPipeError()) == DONE
