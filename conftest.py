"""What the tests of the package (tests/) and of its tools (tools/tests/) share: plugins of pytest, and fixtures."""

import pytest

# In this order: the environment is set before anything reads it, and shapes are checked in what is imported later.
pytest_plugins = (
    "helpers.environment",
    "helpers.shapes",
    "helpers.optimized",
    "helpers.selection",
    "helpers.budget",
    "helpers.garbage",
    "helpers.lowering",
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The runs that tests share (`helpers/runs.py`), for fixtures of modules."""
    from helpers.runs import Runs

    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(runs):
    """A function that returns a run that tests share, by its kind and stage: see `helpers/runs.py`."""
    with runs.world():
        yield runs
    runs.require_unchanged()


@pytest.fixture
def tiny_vit(monkeypatch):
    """Make `vit_digits` a ViT of two narrow blocks and four patches, without published weights."""
    from helpers import tiny

    tiny.use_vit(monkeypatch, patch=32)
