"""What tests share: the `--all` switch, the real sample images, and a check that an error is one plain sentence."""

import os
from pathlib import Path

import pytest

from mlmoe_jax.errors import UserError

os.environ["MLMOE_OFFLINE"] = "1"  # no test, and no program that one starts, fetches weights from the network

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --all"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real VOC and COCO images in their published layouts, which are not part of the repository."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared sample images are not here")
    return folder


@pytest.fixture
def refusal():
    """A function that makes a call, expects UserError with one sentence, and returns the sentence."""

    def call(function, *args, error=UserError, **options) -> str:
        with pytest.raises(error) as caught:
            function(*args, **options)
        text = str(caught.value)
        assert text
        assert "\n" not in text
        assert not text.endswith(".")
        assert ". " not in text
        return text

    return call
