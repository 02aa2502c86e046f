import os

import pytest
from etils import epath

from mlmoe_jax.runtime.storage import Target, opened, whole_file


def test_a_file_appears_whole(tmp_path):
    path = epath.Path(tmp_path / "a.bin")
    with whole_file(path) as partial:
        partial.write_bytes(b"new")
        assert [name.name for name in tmp_path.iterdir()] == [".a.bin.tmp"]
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]


def test_the_old_file_stays_if_the_new_one_fails(tmp_path):
    path = epath.Path(tmp_path / "a.bin")
    path.write_bytes(b"old")

    def fail():
        with whole_file(path) as partial:
            partial.write_bytes(b"ne")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]


def test_two_processes_do_not_share_a_temporary_file(tmp_path):
    with whole_file(epath.Path(tmp_path / "a.csv"), alone=False) as partial:
        assert partial.name == f".a.csv.{os.getpid()}.tmp"
        partial.touch()


def test_an_output_that_cannot_be_written(tmp_path, refusal):
    def write(path):
        with opened(Target(epath.Path(path), "csv")) as file:
            file.write("x\n")

    write(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "x\n"
    assert refusal(write, tmp_path / "none" / "a.csv").startswith(f"cannot write {tmp_path / 'none' / 'a.csv'}: ")
