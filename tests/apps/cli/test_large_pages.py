import os
import subprocess
import sys

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.apps.cli import commands as main
from mlmoe_jax.apps.cli import large_pages
from mlmoe_jax.apps.cli.large_pages import LARGE_PAGES, TUNABLES, use_large_pages


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The commands that would replace this process, on a system that gives large pages on request."""
    commands = []
    monkeypatch.setattr(large_pages, "SETTING", tmp_path / "enabled")
    large_pages.SETTING.write_text("always [madvise] never\n")
    monkeypatch.setenv(TUNABLES, "")  # so that it is restored
    monkeypatch.delenv(TUNABLES)
    monkeypatch.setattr(os, "execv", lambda *command: commands.append(command))
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # whatever measures the coverage
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "mlmoe_jax.main", "--mode=data", "--json"])
    monkeypatch.setattr(sys, "argv", ["main.py", "--mode=data", "--json"])
    return commands


def test_the_process_starts_again_with_large_pages(started):
    use_large_pages()
    assert started == [(sys.executable, [sys.executable, "-m", "mlmoe_jax.main", "--mode=data", "--json"])]
    assert os.environ[TUNABLES] == LARGE_PAGES
    use_large_pages()
    assert len(started) == 1, "once"


@pytest.mark.parametrize("setting", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_where_asking_changes_nothing_the_process_goes_on(started, setting):
    if setting is None:
        large_pages.SETTING.unlink()
    else:
        large_pages.SETTING.write_text(setting)
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
        "from mlmoe_jax.runtime import large_pages\n"
        f"large_pages.SETTING = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "print('begins', flush=True)\n"
        "large_pages.use_large_pages()\n"
        "print(os.getpid(), os.environ[large_pages.TUNABLES], sys.argv[1:], sys.flags.utf8_mode)\n"
        "sys.exit(7)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != TUNABLES}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-X", "utf8", str(tmp_path / "program.py"), "--mode=data", "two words"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    told = ["begins", "begins", f"{process.pid} {LARGE_PAGES} ['--mode=data', 'two words'] 1"]
    assert output.splitlines() == told
    assert process.returncode == 7


def test_the_command_line_asks_for_large_pages_before_it_runs(monkeypatch):
    done = []
    monkeypatch.setattr(main, "use_large_pages", lambda: done.append("large pages"))
    monkeypatch.setattr(main, "main", lambda arguments: done.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["mlmoe", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.console()
    assert done == ["large pages", ["--version"]]
    assert ended.value.code == 0
