"""Files and folders that appear whole, what ended processes have left, outputs, and names and links of others."""

import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import is_file_name
from mlmoe_jax.runtime.storage import (
    Folder,
    OutputTarget,
    atomic_file,
    atomic_folder,
    keep_edited,
    new_temporary,
    open_output,
    remove_leftovers,
    require_new,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    yield (tmp_path / "usual").stat().st_mode
    (tmp_path / "usual").unlink()


def test_two_writers_do_not_share_a_temporary_file(tmp_path):
    path = epath.Path(tmp_path / "a.csv")
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write_text("one")
        other.write_text("other")
        assert sorted(tmp_path.iterdir()) == sorted([one, other]), "the file appears at the end"
    assert path.read_text() == "one"
    assert names(tmp_path) == ["a.csv"]


def test_a_file_that_a_library_puts_in_place_keeps_the_usual_mode(tmp_path, usual_mode):
    with atomic_file(epath.Path(tmp_path / "a.bin")) as partial:
        partial.unlink()
        partial.touch(mode=0o600)
    assert (tmp_path / "a.bin").stat().st_mode == usual_mode


def test_a_folder_appears_whole_and_is_for_all_who_may_read(tmp_path, usual_mode):
    with atomic_folder(require_new(tmp_path / "a")) as partial:
        (partial / "file").touch(mode=0o600)
        assert not (tmp_path / "a").exists()
    assert names(tmp_path / "a") == ["file"]
    assert (tmp_path / "a" / "file").stat().st_mode == usual_mode
    assert names(tmp_path) == ["a", "usual"]


LEAVE = """
import sys, pathlib
from mlmoe_jax.runtime.storage import new_temporary
new_temporary(pathlib.Path(sys.argv[1])).write_text("part")
new_temporary(pathlib.Path(sys.argv[1])).mkdir()
print("written", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path):
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / ".mine.tmp").touch()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LEAVE, folder], **pipes) as process:
        assert process.stdout.readline() == b"written\n"
        remove_leftovers(folder)
        assert len(names(folder)) == 3, "its process lives"
        process.kill()
    elsewhere, old = (folder / f".mlmoe-01234567-1-{start}-0123abcd.tmp" for start in (1, 2))
    elsewhere.touch()
    old.touch()
    os.utime(old, (1, 1))
    remove_leftovers(tmp_path)
    assert len(names(folder)) == 5, "not below the folder"
    with atomic_file(epath.Path(folder / "a.bin")):
        pass
    assert names(folder) == [".mine.tmp", elsewhere.name, "a.bin"]


def test_a_file_stays_while_its_process_is_not_known(tmp_path, monkeypatch):
    ended = new_temporary(tmp_path)
    ended = ended.with_name(re.sub(r"-\d+-\d+-", f"-{os.getppid()}-7-", ended.name))
    ended.touch()

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        remove_leftovers(tmp_path)
    assert ended.exists()
    remove_leftovers(tmp_path)
    assert not ended.exists()


def test_a_file_that_changes_before_it_is_replaced_is_read_again(tmp_path):
    """A person saves the file twice while it is written."""
    path, seen = tmp_path / "a.csv", []
    path.write_bytes(b"0")

    def content() -> bytes:
        seen.append(path.read_bytes())
        if len(seen) < 3:
            path.write_bytes(b"%d" % len(seen))
        return seen[-1] + b" and ours"

    Folder(tmp_path).update("a.csv", content)
    assert (path.read_bytes(), seen) == (b"2 and ours", [b"0", b"1", b"2"])
    assert names(tmp_path) == ["a.csv"]


def test_a_file_of_somebody_keeps_its_permissions_and_its_link(tmp_path):
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "a.csv"
    file.touch()
    file.chmod(0o640)
    (tmp_path / "link.csv").symlink_to("below/a.csv")
    Folder(tmp_path).update("link.csv", lambda: b"new")
    assert (tmp_path / "link.csv").is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o640)
    (tmp_path / "below" / "out.csv").symlink_to("../b.csv")
    with pytest.raises(UserError, match=r"out\.csv is a link out of the folder"):
        Folder(tmp_path / "below").update("out.csv", lambda: b"new")
    assert not (tmp_path / "b.csv").exists()


def write_output(path: Path, text: str, **options) -> None:
    with open_output(OutputTarget(epath.Path(path), "csv", **options)) as file:
        file.write(text)


def test_standard_output_may_be_text_as_in_a_notebook(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with open_output(OutputTarget(None, "csv")) as file:
        file.write("image,labels\n")
    assert sys.stdout.getvalue() == "image,labels\n"


def test_an_output_that_somebody_has_edited_is_renamed(tmp_path, caplog):
    path = tmp_path / "a.csv"
    for text in ("1", "2"):
        write_output(path, text, is_named=False)
    assert not caplog.text
    for mine in ("mine", "mine too"):
        path.write_text(mine)
        write_output(path, "3", is_named=False)
    assert f"{path} was edited since it was written, and is now {tmp_path / 'a-2.csv'}" in caplog.text
    found = {path.name: path.read_text() for path in tmp_path.glob("[a-z]*")}
    assert found == {"a.csv": "3", "a-2.csv": "mine", "a-3.csv": "mine too"}


def test_a_killed_process_has_edited_nothing(tmp_path, caplog):
    path = tmp_path / "a.csv"
    write_output(path, "1", is_named=False)
    keep_edited(epath.Path(path), "of a file that the process did not move here before it was killed")
    for text in ("2", "3"):
        write_output(path, text, is_named=False)
    assert not caplog.text
    assert sorted(names(tmp_path)) == [".a.csv.sha256", "a.csv"]


def test_an_output_that_the_user_names_is_written_through_a_link(tmp_path):
    (tmp_path / "link.csv").symlink_to("below/a.csv")
    (tmp_path / "below").mkdir()
    for text in ("1", "2"):  # also if the target is new
        write_output(tmp_path / "link.csv", text)
        assert (tmp_path / "below" / "a.csv").read_text() == text
    write_output(tmp_path / "link.csv", "3", is_named=False)  # of a run folder, which may be from somebody else
    assert (tmp_path / "below" / "a.csv").read_text() == "2"
    (tmp_path / "round.csv").symlink_to("round.csv")
    (tmp_path / "pipe.csv").symlink_to("/dev/null")
    for name, reason in (("round.csv", "Too many levels"), ("pipe.csv", "not a regular file")):
        with pytest.raises(UserError, match=f"cannot write .*{name}: .*{reason}"):
            write_output(tmp_path / name, "1")


# ------------------------------------------------------------------------------------------- names and links of others
NAMES = ["a.arrayrecord", ".hidden", "..a", "a b", "grün", "x" * 255]
OTHERS = ["", ".", "..", "a/b", "../a", "/a", "a/", "a\0b", "\ud800", "x" * 256, 5, None, [""]]


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_names_of_files(name):
    assert is_file_name(name) == (name in NAMES)


def test_a_folder_names_what_is_inside_also_behind_links(tmp_path):
    (tmp_path / "real" / "eval").mkdir(parents=True)
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "real" / "same").symlink_to("eval")
    (tmp_path / "real" / "round").symlink_to("round")
    for folder in (Folder(tmp_path / "linked"), Folder("gs://bucket/set")):
        for name in ("eval", "eval/new.json", "same/new.json", "new/er", "round"):
            assert str(folder.inside(name)) == f"{folder}/{name}"
