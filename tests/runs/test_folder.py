import csv
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mlmoe_jax.runs.folder import METRICS, RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.writing():
        yield folder


# --------------------------------------------------------------------------------------------------------- opening
def test_writing_makes_the_folder(tmp_path):
    folder = RunFolder(str(tmp_path / "a" / "b"))
    with folder.writing():
        assert (tmp_path / "a" / "b").is_dir()
    assert str(folder) == str(tmp_path / "a" / "b")
    assert str(folder / "x") == str(tmp_path / "a" / "b" / "x")
    assert folder.is_local
    assert not RunFolder("gs://bucket/run").is_local


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path, refusal):
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_in_use()
    assert not folder.path.exists()
    with folder.writing():
        sentence = f"another process is writing to {folder}; wait for it or name another folder"
        assert refusal(RunFolder(folder.path).writing().__enter__) == sentence
        assert RunFolder(folder.path).is_in_use()
    assert not folder.is_in_use()
    assert not RunFolder("gs://bucket/run").is_in_use()
    with folder.writing():
        pass


def test_a_second_writer_may_wait(tmp_path):
    order = []

    def write():
        with RunFolder(tmp_path).writing(wait=True):
            order.append("second")

    second = threading.Thread(target=write)
    with RunFolder(tmp_path).writing():
        second.start()
        second.join(timeout=0.2)
        order.append("first")
    second.join(timeout=10)
    assert order == ["first", "second"]


def test_only_the_first_process_makes_and_locks_the_folder(tmp_path, monkeypatch, refusal):
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (1, 2))
    with folder.writing_by_first():
        assert not folder.path.exists()
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (0, 2))
    with folder.writing_by_first():
        assert "another process is writing" in refusal(folder.writing_by_first().__enter__)


def test_a_path_that_cannot_become_a_folder_is_refused(tmp_path, refusal, monkeypatch):
    (tmp_path / "file").write_text("")
    for below, reason in (("file", "File exists"), ("file/a/run", "Not a directory")):
        folder = RunFolder(tmp_path / below)
        assert refusal(folder.require_creatable) == f"cannot make the run folder {folder}: {tmp_path}/file is a file"
        assert refusal(folder.writing().__enter__) == f"cannot make the run folder {folder}: {reason}"
    for path in (tmp_path, tmp_path / "new" / "run", "relative/run"):
        RunFolder(path).require_creatable()
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "no folder is made yet"
    monkeypatch.setattr("os.access", lambda path, how: False)
    place = tmp_path / "new" / "run"
    sentence = refusal(RunFolder(place).require_creatable)
    assert sentence == f"cannot make the run folder {place}: {tmp_path} is not writable"


def test_an_object_store_needs_its_library(refusal, monkeypatch):
    there = {"gcsfs": False}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there[name] or None)
    sentence = "run folders at gs:// need the package gcsfs: pip install gcsfs"
    assert refusal(RunFolder("gs://bucket/run").require_creatable) == sentence
    assert refusal(RunFolder("gs://bucket/run").require, "config.json") == sentence
    there["gcsfs"] = True
    RunFolder("gs://bucket/run").require_creatable()


def test_require_names_the_missing_file(folder, tmp_path, refusal):
    sentence = refusal(RunFolder(tmp_path / "none").require, "config.json")
    assert sentence == f"there is no run folder {tmp_path}/none; give the --workdir of a finished or stopped training"
    folder.write_text("config.json", "{}")
    folder.require("config.json")
    sentence = refusal(folder.require, "config.json", "checkpoints", "labels.txt")
    assert sentence == f"{folder} is not the run folder of a training: it has no checkpoints"


# ----------------------------------------------------------------------------------------------------- whole files
def test_files_are_written_and_replaced(folder):
    folder.write_text("labels.txt", "a\n")
    folder.write_text("labels.txt", "grün\n")
    assert folder.read_text("labels.txt") == "grün\n"
    folder.write_bytes("deep/er/x.bin", b"\x00\xff")
    assert (folder / "deep/er/x.bin").read_bytes() == b"\x00\xff"
    folder.write_json("x.json", {"a": [1, 2.5, None, float("nan")], "b": (1, float("inf"))})
    assert folder.read_json("x.json") == {"a": [1, 2.5, None, None], "b": [1, None]}, "JSON has no such numbers"
    folder.write_npz("x.npz", ids=np.array(["a", "b"]), scores=np.eye(2))
    with np.load(folder / "x.npz", allow_pickle=False) as stored:
        assert stored["ids"].tolist() == ["a", "b"]
        np.testing.assert_array_equal(stored["scores"], np.eye(2))
    folder.write_csv("x.csv", ["name", "AP"], [["a, b", 0.5], ['"c"', float("nan")]])
    with open(folder / "x.csv", newline="") as file:
        assert list(csv.reader(file)) == [["name", "AP"], ["a, b", "0.5"], ['"c"', ""]]
    assert not list(Path(folder.path).rglob("*.tmp"))


@pytest.mark.parametrize("content", [b'{"mAP": 0.', b"", b"\xff\xfe\x00"])
def test_damaged_json_is_reported_in_one_sentence(folder, refusal, content):
    folder.write_bytes("results.json", content)
    assert refusal(folder.read_json, "results.json").startswith(f"{folder}/results.json is damaged: ")


# ------------------------------------------------------------------------------------------------ links of others
@pytest.mark.parametrize("link", ["report.html", "metrics.jsonl"])
def test_a_link_in_the_place_of_a_file_is_replaced(folder, precious, link):
    os.symlink(precious, folder / link)
    folder.write_text("report.html", "page")
    folder.drop_rows_after(0)
    assert folder.read_text("report.html") == "page"
    assert folder.rows() == []
    assert not any(path.is_symlink() for path in Path(folder.path).iterdir())


def test_the_lock_is_neither_emptied_nor_taken_through_a_link(tmp_path, precious, refusal):
    def write():
        with RunFolder(tmp_path).writing():
            return (tmp_path / ".lock").read_text()

    (tmp_path / ".lock").write_text("kept")
    assert write() == "kept"
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to(precious)
    sentence = f"cannot lock {tmp_path}: Too many levels of symbolic links; remove {tmp_path}/.lock"
    assert refusal(write) == sentence
    (tmp_path / ".lock").unlink()
    os.link(precious, tmp_path / ".lock")
    assert write() == "precious"


def test_a_run_below_and_its_files_are_inside(folder, precious, tmp_path, refusal):
    level = folder.below("prune/levels/a")
    level.write_text("config.json", "{}")
    level.write_text("eval/results.json", "{}")
    chosen = RunFolder(tmp_path / "chosen")
    chosen.adopt(level)
    assert sorted(chosen.files()) == ["config.json", "eval/results.json"]
    os.symlink(precious, level / "labels.txt")
    assert "labels.txt is a link out of the run folder" in refusal(RunFolder(tmp_path / "next").adopt, level)
    os.symlink(precious.parent, folder / "prune/levels/b")
    assert f"{folder}/prune/levels/b is a link out of" in refusal(folder.below, "prune/levels/b")


def test_nothing_is_written_through_a_link_to_another_folder(folder, precious, refusal):
    os.symlink(precious.parent, folder / "samples")
    assert f"{folder}/samples is a link out of the run folder" in refusal(folder.write_text, "samples/new.json", "{}")


# ----------------------------------------------------------------------------------------------------- metric rows
def test_rows_are_appended(folder):
    assert folder.rows() == []
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": float("inf"), "val/mAP": 0.25}]
    for row in rows:
        folder.append_row(row)
    rows[1]["loss"] = None  # JSON has no infinity
    assert folder.rows() == rows
    assert [json.loads(line) for line in folder.read_text(METRICS).splitlines()] == rows


def test_rows_after_a_step_and_a_truncated_one_are_dropped(folder):
    folder.drop_rows_after(0)
    assert folder.rows() == []
    for step in (1, 2, 3, 4):
        folder.append_row({"step": step})
    with open(folder / METRICS, "a") as file:
        file.write('{"step": 5, "lo')
    assert folder.rows() == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4}]
    folder.drop_rows_after(2)
    folder.append_row({"step": 3})
    assert folder.rows() == [{"step": 1}, {"step": 2}, {"step": 3}]


# --------------------------------------------------------------------------------------------------- object stores
def test_no_locks_and_no_renaming_in_an_object_store(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    folder.is_local = False
    (tmp_path / "run" / "deep").mkdir(parents=True)  # an object needs no folder

    def not_supported(*_):
        raise AssertionError("object stores do not support this")

    for module, name in (("os", "replace"), ("os", "fsync"), ("filelock.FileLock", "acquire")):
        monkeypatch.setattr(f"{module}.{name}", not_supported)
    with folder.writing(), folder.writing():
        folder.write_json("deep/x.json", {"a": 1})
        folder.append_row({"step": 1})
        folder.append_row({"step": 2})
        folder.drop_rows_after(1)
        folder.append_row({"step": 3})
        assert folder.rows() == [{"step": 1}, {"step": 3}]
        folder.uploads.close()
    assert folder.read_json("deep/x.json") == {"a": 1}
    assert RunFolder(tmp_path / "run").rows() == folder.rows() == [{"step": 1}, {"step": 3}]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["deep", "metrics.jsonl"]
