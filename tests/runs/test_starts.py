"""The starts of a training."""

import importlib.metadata
import json
import platform

import jax
import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.starts import read_starts, record_start, versions
from mlmoe_jax.runtime.sharding import make_mesh


def test_every_start_is_recorded(tmp_path):
    folder, mesh = RunFolder(tmp_path), make_mesh(default_config().mesh)
    assert read_starts(folder) == []
    record_start(folder, 0, mesh)
    record_start(folder, 7, mesh)
    starts = json.loads((tmp_path / "starts.json").read_text())
    assert [start["step"] for start in starts] == [0, 7]
    assert starts == read_starts(folder)
    found = starts[0]["versions"]
    assert found == versions()
    assert found["python"] == platform.python_version()
    assert (found["jax"], found["flax"]) == (jax.__version__, importlib.metadata.version("flax"))
    assert starts[0]["devices"] == jax.device_count()
    assert starts[0]["mesh"] == {"data": jax.device_count(), "fsdp": 1, "expert": 1}
    assert (starts[0]["device"], starts[0]["processes"]) == (jax.devices()[0].device_kind, 1)


@pytest.mark.parametrize("content", [b"", b'[{"step": 0', b"\xff\xfe", b"5"])
def test_a_file_of_another_kind_is_named_and_replaced(tmp_path, caplog, content):
    folder = RunFolder(tmp_path)
    (tmp_path / "starts.json").write_bytes(content)
    assert read_starts(folder) == []
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'starts.json'} is damaged: ")
    record_start(folder, 7, make_mesh(default_config().mesh))
    assert [start["step"] for start in read_starts(folder)] == [7]
