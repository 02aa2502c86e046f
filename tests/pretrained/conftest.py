"""Fixtures of the tests of PyTorch files."""

import pytest
from helpers.torch_pickles import WRITE

from mlmoe_jax.pretrained.load import read_tensors


@pytest.fixture(params=WRITE)
def read(request, tmp_path):
    """A function that reads a handmade pickle, in each layout."""
    return lambda pickled, **more: read_tensors(WRITE[request.param](tmp_path / "w.pth.tar", pickled, **more))
