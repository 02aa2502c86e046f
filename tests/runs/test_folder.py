import importlib.metadata
import json
import math
import os
import platform

import jax
import pytest

from mlmoe_jax.config import default_config
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import METRICS, RunFolder
from mlmoe_jax.runs.starts import read_starts, record_start, versions
from mlmoe_jax.runtime.sharding import make_mesh


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.writing():
        yield folder


# --------------------------------------------------------------------------------------------------------- opening


def test_a_folder_is_in_use_until_its_writer_has_ended(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_in_use()
    assert not folder.path.exists()
    for _ in range(2):
        with folder.writing():
            assert RunFolder(folder.path).is_in_use()
        assert not folder.is_in_use()
    assert not RunFolder("gs://bucket/run").is_in_use()


def test_only_the_first_process_makes_and_locks_the_folder(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (1, 2))
    with folder.writing_by_first():
        assert not folder.path.exists()
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (0, 2))
    with folder.writing_by_first():
        assert folder.is_in_use()


def test_what_can_be_made_and_what_is_there_is_accepted(folder, tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "new" / "run", "relative/run"):
        RunFolder(path).require_creatable()
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no folder is made yet"
    folder.write_text("config.json", "{}")
    folder.require("config.json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "gcsfs" or None)
    RunFolder("gs://bucket/run").require_creatable()


# ------------------------------------------------------------------------------------------------ links of others
def test_a_link_in_the_place_of_a_file_is_replaced(folder, precious):
    os.symlink(precious, folder / "report.html")
    folder.write_text("report.html", "page")
    assert folder.read_text("report.html") == "page"
    assert not os.path.islink(folder / "report.html")


def test_no_file_is_read_through_a_link_out_of_the_folder(folder, precious):
    os.symlink(precious, folder / "metrics.jsonl")
    for read in (folder.rows, lambda: folder.read_text("metrics.jsonl")):
        with pytest.raises(UserError, match="is a link out of the run folder"):
            read()


def test_the_content_of_the_lock_is_kept(tmp_path, precious):
    """Also if it is another name of a file of the user."""
    os.link(precious, tmp_path / ".lock")
    with RunFolder(tmp_path).writing():
        pass


def test_a_run_below_is_adopted_with_all_its_files(folder, tmp_path):
    level = folder.below("prune/levels/a")
    level.write_text("config.json", "{}")
    level.write_text("eval/results.json", "{}")
    chosen = RunFolder(tmp_path / "chosen")
    chosen.adopt(level)
    assert sorted(chosen.files()) == ["config.json", "eval/results.json"]


# ----------------------------------------------------------------------------------------------------- metric rows


LINES = {
    "half a row": b'{"step": 5, "lo',
    "not UTF-8": b"\xff\xfe\n",
    "a number": b"5\n",
    "without end": b"[" * 100_000,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_rows_are_appended_and_those_after_a_step_and_other_lines_dropped(folder, capsys, line):
    folder.drop_rows_after(0)
    for step in (1, 2, 3, 4):
        folder.append_row({"step": step, "loss": math.inf})
    with open(folder / METRICS, "ab") as file:
        file.write(line)
    assert folder.rows() == [{"step": step, "loss": None} for step in (1, 2, 3, 4)]
    assert f"{folder / METRICS}: 1 damaged line left out" in capsys.readouterr().err
    folder.drop_rows_after(2)
    folder.append_row({"step": 3})
    assert [row["step"] for row in folder.rows()] == [1, 2, 3]


# ---------------------------------------------------------------------------------------------------------- starts
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
