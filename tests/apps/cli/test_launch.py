"""The launch scripts, with a fake Python that records its arguments."""

import os
import subprocess

import pytest
from helpers.paths import REPOSITORY

RECORDER = r"""#!/usr/bin/env bash
case "$1" in --version) echo "Python ${VERSION:-3.11.99}"; exit ;; -c) exit "${OLD:-0}" ;; esac
echo "$@" >> "$RECORD"
if [ "$2" = venv ]; then
  for place; do :; done
  mkdir -p "$place/bin"
  sed 's/\${VERSION:-[0-9.]*}/'"${VERSION:-3.11.99}/" "$0" > "$place/bin/python" && chmod +x "$place/bin/python"
fi
if [ "$1" = "-" ]; then echo some-tool; fi
"""


@pytest.fixture
def launch(tmp_path):
    python = tmp_path / "python3"
    python.write_text(RECORDER)
    python.chmod(0o755)
    record = tmp_path / "record"

    def run(script, *arguments, code=0, **variables):
        """Return the calls of Python, or of a script that is refused with an exit code the error."""
        record.write_text("")
        environment = dict(
            os.environ, PYTHON=str(python), MLMOE_VENV=str(tmp_path / "venv"), RECORD=str(record), **variables
        )
        done = subprocess.run(
            ["bash", REPOSITORY / script, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == code, done.stderr
        calls = record.read_text().splitlines()
        return (done.stderr, calls) if code else calls

    return run


def test_local_sets_up_once_and_trains_ml_vpt_on_digits(launch, tmp_path):
    calls = launch("launch/local.sh")
    assert calls[0] == f"-m venv {tmp_path / 'venv'}"
    assert calls[1].startswith("-m pip install")
    assert calls[1].endswith("-r requirements.txt")
    assert calls[2:] == ["-m mlmoe_jax.main --config=configs/mlvpt_digits.py --workdir=runs/digits"]
    calls = launch("launch/local.sh")
    assert len(calls) == 1
    stamp = tmp_path / "venv" / "made-from.txt"
    assert (REPOSITORY / "requirements.txt").read_text() in stamp.read_text()
    stamp.write_text("another")
    calls = launch("launch/local.sh")
    assert ["pip install" in call for call in calls] == [True, False], "changed requirements are installed"


DIGITS, RUN = "--config=configs/mlvpt_digits.py", "--workdir=runs/digits"


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ("--config.train.epochs=2 --workdir=elsewhere", [DIGITS]),
        ("--mode=report", [RUN]),
        ("--mode eval", [RUN]),
        ("--mode=train", [DIGITS, RUN]),
        ("--sweep=config=vpt,gvpt", [RUN]),
        ("--config vpt", [RUN]),
        ("--seed=1", [DIGITS, RUN]),
        ("--mode=data --config=vpt", []),  # it has no run folder
    ],
)
def test_local_names_a_config_and_a_folder_where_they_are_missing(launch, flags, added):
    calls = launch("launch/local.sh", *flags.split())
    assert calls[-1] == " ".join(["-m mlmoe_jax.main", flags, *added])


def test_another_interpreter_makes_the_environment_anew(launch, tmp_path):
    launch("launch/local.sh")
    calls = launch("launch/local.sh", VERSION="3.12.1")
    assert calls[0] == f"-m venv --clear {tmp_path / 'venv'}"
    assert (tmp_path / "venv" / "made-from.txt").read_text().startswith("Python 3.12.1\n")
    calls = launch("launch/local.sh", VERSION="3.12.1")
    assert len(calls) == 1, "it matches now"
    (tmp_path / "venv" / "made-from.txt").unlink()
    error, calls = launch("launch/local.sh", code=2)
    assert not calls, "somebody else's environment is not replaced"
    assert "is not of Python 3.11.99; set MLMOE_VENV to another folder" in error


def test_locked_versions_are_installed_with_their_checksums(launch, tmp_path):
    calls = launch("launch/local.sh", MLMOE_LOCKED="1")
    installs = [call for call in calls if "pip install" in call]
    assert [call.partition("--require-hashes ")[2] for call in installs] == ["-r locks/base.lock"]
    assert (REPOSITORY / "locks/base.lock").read_text() in (tmp_path / "venv" / "made-from.txt").read_text()
    error, _ = launch("launch/test.sh", MLMOE_LOCKED="1", code=2)
    assert "there is no locks/dev.lock; unset MLMOE_LOCKED" in error


def test_the_test_script_installs_its_tools_and_forwards_its_flags(launch, tmp_path):
    calls = launch("launch/test.sh", "--all")
    tools = tmp_path / "venv" / "dev.txt"
    assert any(call.startswith("-m pip install") and call.endswith(f"-r {tools}") for call in calls)
    assert tools.read_text() == "some-tool\n"
    assert [call for call in calls if "-m pytest" in call] == [
        "-m pytest -n 2 --dist loadfile tests/models",
        "-m pytest -n 2 --max-worker-restart=0 --dist loadfile --no-loadscope-reorder --all",
    ]
    calls = launch(".ci/run")
    assert calls[-1] == "-m pytest -n 2 --max-worker-restart=0 --dist loadfile --no-loadscope-reorder"


@pytest.mark.parametrize("gpu", [False, True])
def test_prove_sets_up_jax_for_the_accelerator(launch, tmp_path, gpu):
    tools = tmp_path / "tools"
    tools.mkdir()
    if gpu:
        (tools / "nvidia-smi").write_text("#!/bin/sh\n")
        (tools / "nvidia-smi").chmod(0o755)
    calls = launch("launch/prove.sh", "--short", PATH=f"{tools}:{os.environ['PATH']}")
    assert any(call.startswith("-m pip install") and call.endswith("cuda.txt") for call in calls) is gpu
    assert calls[-1] == "-m benchmarks.prove --short"


def test_an_old_python_is_refused(launch, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13"):
        (old / name).write_text("#!/bin/sh\nexit 1\n")
        (old / name).chmod(0o755)
    error, calls = launch("launch/local.sh", OLD="1", PATH=f"{old}:{os.environ['PATH']}", code=2)
    assert "no Python 3.11 or newer" in error
    assert calls == []
