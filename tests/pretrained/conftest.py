"""Fixtures of the tests of downloads and of PyTorch files."""

import threading
from pathlib import Path

import pytest
from helpers.file_site import CHUNK, Site
from helpers.torch_pickles import LAYOUTS, WRITE, reason_of

from mlmoe_jax.pretrained import download
from mlmoe_jax.pretrained.load import read_tensors


@pytest.fixture
def pauses(monkeypatch):
    """The requested pauses, which are skipped; environment variables for proxies and tokens are removed."""
    asked = []
    monkeypatch.setattr(download, "pause", asked.append)
    monkeypatch.setattr(download, "READ_BYTES", CHUNK)
    for name in ("MLMOE_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return asked


@pytest.fixture
def site():
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path) -> Path:
    """A path in a cache folder that does not exist yet."""
    return tmp_path / "cache" / "vit" / "model.safetensors"


@pytest.fixture
def why(refusal, tmp_path):
    """A function that returns the reason why a file is refused."""
    return lambda path: reason_of(refusal(read_tensors, path), path)


@pytest.fixture(params=LAYOUTS)
def read(request, tmp_path):
    """A function that reads a handmade pickle, in each layout."""
    return lambda pickled, **more: read_tensors(WRITE[request.param](tmp_path / "w.pth", pickled, **more))


@pytest.fixture(params=LAYOUTS)
def reason(request, tmp_path, why):
    """A function that returns the reason why a handmade pickle is refused, in each layout."""
    return lambda pickled, **more: why(WRITE[request.param](tmp_path / "w.pth", pickled, **more))
