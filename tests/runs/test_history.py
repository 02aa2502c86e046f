"""Each start of a training is recorded: versions, devices, mesh."""

import importlib.metadata
import json
import platform

import jax

from mlmoe_jax.config import default_config
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.history import read_starts, record_start, versions
from mlmoe_jax.runtime.sharding import make_mesh


def test_versions_are_those_of_the_installed_libraries():
    found = versions()
    assert found["python"] == platform.python_version()
    assert (found["jax"], found["flax"]) == (jax.__version__, importlib.metadata.version("flax"))


def test_every_start_is_recorded(tmp_path):
    folder, mesh = RunFolder(tmp_path), make_mesh(default_config().mesh)
    assert read_starts(folder) == []
    record_start(folder, 0, mesh)
    record_start(folder, 7, mesh)
    starts = json.loads((tmp_path / "starts.json").read_text())
    assert [start["step"] for start in starts] == [0, 7]
    assert starts == read_starts(folder)
    assert starts[0]["versions"] == versions()
    assert starts[0]["devices"] == jax.device_count()
    assert starts[0]["mesh"] == {"data": jax.device_count(), "fsdp": 1, "expert": 1}
    assert (starts[0]["device"], starts[0]["processes"]) == (jax.devices()[0].device_kind, 1)


def test_a_damaged_file_is_named(tmp_path, refusal):
    (tmp_path / "starts.json").write_text("[")
    assert "starts.json is damaged" in refusal(read_starts, RunFolder(tmp_path))
