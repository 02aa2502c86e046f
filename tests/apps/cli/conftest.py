"""Fixtures that the tests of the command line share."""

import subprocess

import pytest


@pytest.fixture
def command(capsys):
    """Return a function that runs a command in this process."""
    from mlmoe_jax.main import main

    def run(*arguments) -> subprocess.CompletedProcess:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    return run
