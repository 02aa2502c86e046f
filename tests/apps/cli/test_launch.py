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


@pytest.fixture
def choose(tmp_path):
    """A function that returns what the scripts say about their choice, with interpreters of these versions on the path.

    An interpreter of version "" only prints an error. `variables` are of the environment.
    """
    tools = tmp_path / "tools"
    tools.mkdir()

    def run(interpreters, code=0, **variables):
        for name, version in interpreters.items():
            (tools / name).write_text(
                RECORDER.replace("3.11.99", version) if version else "#!/bin/sh\necho no >&2; exit 127\n"
            )
            (tools / name).chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", f". {REPOSITORY / 'launch/environment.sh'}; choose_python"],
            env={"PATH": f"{tools}:{os.environ['PATH']}", "MLMOE_VENV": str(tmp_path / "venv")} | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code
        return done.stderr

    return run


NONE = dict.fromkeys(("python", "python3", "python3.11", "python3.12", "python3.13"), "")


def test_the_newest_python_that_runs_is_chosen(choose):
    said = choose({**NONE, "python3.12": "3.12.1", "python3.11": "3.11.7"})
    assert said == "Python 3.12.1, python3.12: the newest on the PATH that runs; not suitable: python3.13\n"
    said = choose({"python3.12": "", "python3.11": "3.11.7"}).splitlines()
    assert said[0] == "Python 3.11.7, python3.11: the newest on the PATH that runs; not suitable: python3.13 python3.12"
    assert "Python 3.12 or newer" in said[1], "what 3.11 does not give"
    assert choose({"python3.11": "", "python": "3.14.0"}).startswith("Python 3.14.0, python: the newest")


def test_python_is_an_order(choose, tmp_path):
    assert (
        choose({**NONE, "python3.13": "3.13.0", "mine": "3.12.1"}, PYTHON="mine")
        == "Python 3.12.1, mine: set by PYTHON\n"
    )
    said = choose({"mine": ""}, code=2, PYTHON="mine")
    assert said == "error: PYTHON=mine does not run as Python 3.11 or newer with venv and ensurepip; set another\n"


def test_an_environment_keeps_its_python(launch, choose, tmp_path):
    launch("launch/local.sh", VERSION="3.12.1")
    said = choose({**NONE, "python3.13": "3.13.0"})
    assert said.startswith(f"Python 3.12.1, {tmp_path / 'venv/bin/python'}: the environment exists")


def test_a_machine_without_a_suitable_python_is_refused(choose):
    assert "no Python 3.11 or newer" in choose(NONE, code=2)
