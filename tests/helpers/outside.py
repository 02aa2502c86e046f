"""Programs of other people, in the interpreters that have them: MLMOE_OUTSIDE=PYTHON:PYTHON names further ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def outside_python(module: str) -> str:
    """Return an interpreter that can import a module; skips the test if there is none."""
    for python in [sys.executable, *filter(None, os.environ.get("MLMOE_OUTSIDE", "").split(os.pathsep))]:
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"no interpreter has {module}; name one that has it in MLMOE_OUTSIDE")


def run_outside(python: str, code: str, *arguments: object, cwd: Path | None = None, **variables: str) -> str:
    """Run a program without our packages in its path; return its output, and fail if it fails.

    cwd: its working directory; variables: of its environment.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [python, "-c", code, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=500)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def outside_packages(python: str) -> str:
    """Return the folder with the packages of an interpreter, for the end of the path of a program of ours."""
    return run_outside(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
