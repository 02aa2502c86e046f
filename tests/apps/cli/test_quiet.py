"""What the command line changes for the whole process: messages of libraries, and standard output."""

import logging
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from mlmoe_jax.apps.cli.quiet import quiet_libraries
from mlmoe_jax.errors import NO_ROOM, NoRoom


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """The folder of compiled programs."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path))
    (tmp_path / "programs").mkdir()
    return tmp_path / "programs"


def state() -> tuple:
    logs = [tuple(logging.getLogger(name).filters) for name in ("asyncio", "absl")]
    return sys.unraisablehook, warnings.showwarning, *logs


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_everything_is_restored(error):
    before = state()
    if error is None:
        with quiet_libraries():
            assert all(one != other for one, other in zip(state(), before, strict=True))
    else:
        with pytest.raises(error), quiet_libraries():
            raise error
    assert state() == before


def test_after_a_full_disk_the_filters_stay():
    """What Orbax leaves behind reports when it is destroyed, at the end of the process."""
    before = state()
    with pytest.raises(NoRoom), quiet_libraries():
        raise NoRoom("full")
    after = state()
    assert after != before
    sys.unraisablehook, warnings.showwarning = before[:2]
    for name, filters in zip(("asyncio", "absl"), before[2:], strict=True):
        logging.getLogger(name).filters[:] = filters


def test_only_messages_about_errors_that_are_raised_too_are_suppressed(monkeypatch, caplog):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    closed, other = (SimpleNamespace(object=None, exc_value=RuntimeError(m)) for m in ("Event loop is closed", "other"))
    with quiet_libraries():
        for event in (closed, other):
            sys.unraisablehook(event)
        logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: x")
        logging.getLogger("asyncio").error("something else")
        full = OSError(28, "No space left on device")
        logging.getLogger("absl").error("a thread failed", exc_info=(OSError, full, None))
    assert shown == [other]
    assert caplog.messages == ["something else"]


def test_trouble_with_compiled_programs_is_one_line_and_other_warnings_pass(programs, capsys, monkeypatch):
    passed: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: passed.append(str(message)))
    (programs / "jit_a-1-cache").touch()
    (programs / "jit_b-1-cache").touch()
    with warnings.catch_warnings(), quiet_libraries():
        warnings.simplefilter("always")
        for name in "ab":
            reason = "OSError: [Errno 28] No space left on device"
            warnings.warn(f"Error writing persistent compilation cache entry for 'jit_{name}': {reason}", stacklevel=1)
        warnings.warn("Error reading persistent compilation cache entry for 'jit_a': zlib.error: x\ny", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert capsys.readouterr().err.splitlines() == [
        f"compiled programs are not kept for later runs: {programs} cannot be written "
        "(OSError: [Errno 28] No space left on device)",
        f"compiled programs in {programs} that cannot be read are compiled again (zlib.error: x)",
    ]
    assert [path.name for path in programs.iterdir()] == ["jit_b-1-cache"], "JAX writes the damaged one again"
    assert passed == ["something else"]


# ----------------------------------------------------------------------------------------------------- standard output
def program(output: str, **pipes) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"{sys.executable} -m mlmoe_jax.main --help=optim.b1 {output}"
    return subprocess.run(["bash", "-c", command], text=True, capture_output=True, env=environment)


def test_output_to_a_full_disk_has_a_sentence():
    done = program("> /dev/full")
    assert done.returncode == NO_ROOM
    assert done.stderr == (
        "error: cannot write standard output: No space left on device; make room and repeat the same command\n"
    )


def test_a_reader_that_closes_the_output_ends_the_command_without_an_error():
    done = program("> >(true); sleep 1")
    assert (done.returncode, done.stderr) == (0, "")
