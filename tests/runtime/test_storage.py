import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from mlmoe_jax.runtime import storage
from mlmoe_jax.runtime.files import is_file_name, open_to_append
from mlmoe_jax.runtime.storage import (
    Folder,
    OutputTarget,
    atomic_file,
    atomic_folder,
    new_temporary,
    open_output,
    remove_leftovers,
    require_new,
)


def test_a_file_is_replaced_whole_or_the_old_one_stays(tmp_path):
    path = epath.Path(tmp_path / "a.bin")
    with atomic_file(path) as partial:
        partial.write_bytes(b"old")
        assert list(tmp_path.iterdir()) == [partial]
    assert path.read_bytes() == b"old"

    def fail():
        with atomic_file(path) as partial:
            partial.write_bytes(b"ne")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]


def test_two_writers_do_not_share_a_temporary_file(tmp_path):
    path = epath.Path(tmp_path / "a.csv")
    with atomic_file(path) as one, atomic_file(path) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


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
        assert len(list(folder.iterdir())) == 3, "its process lives"
        process.kill()
    elsewhere, old = (folder / f".mlmoe-01234567-1-{start}-0123abcd.tmp" for start in (1, 2))
    elsewhere.touch()
    old.touch()
    os.utime(old, (1, 1))
    remove_leftovers(tmp_path)
    assert len(list(folder.iterdir())) == 5, "not below the folder"
    with atomic_file(epath.Path(folder / "a.bin")):
        pass
    assert sorted(path.name for path in folder.iterdir()) == [".mine.tmp", elsewhere.name, "a.bin"]


def test_a_file_stays_if_its_process_cannot_be_looked_up(tmp_path, monkeypatch):
    ended = new_temporary(tmp_path)
    ended = ended.with_name(ended.name.replace(f"-{os.getpid()}-", f"-{os.getppid()}-"))
    ended.touch()

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        remove_leftovers(tmp_path)
    assert ended.exists()
    remove_leftovers(tmp_path)
    assert not ended.exists()


def test_a_file_that_a_library_puts_in_place_keeps_the_usual_mode(tmp_path):
    (tmp_path / "plain").touch()
    with atomic_file(epath.Path(tmp_path / "a.bin")) as partial:
        partial.unlink()
        partial.touch(mode=0o600)
    assert (tmp_path / "a.bin").stat().st_mode == (tmp_path / "plain").stat().st_mode


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
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_that_somebody_has_edited_is_renamed(tmp_path, caplog):
    target = OutputTarget(epath.Path(tmp_path / "a.csv"), "csv", is_named=False)

    def write(text: str) -> None:
        with open_output(target) as file:
            file.write(text)

    write("1")
    write("2")
    assert not caplog.text
    for mine in ("mine", "mine too"):
        (tmp_path / "a.csv").write_text(mine)
        write("3")
    assert f"{tmp_path / 'a.csv'} was edited since it was written, and is now {tmp_path / 'a-2.csv'}" in caplog.text
    found = {path.name: path.read_text() for path in tmp_path.glob("[a-z]*")}
    assert found == {"a.csv": "3", "a-2.csv": "mine", "a-3.csv": "mine too"}


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with atomic_folder(tmp_path / "a") as partial:
        assert list(tmp_path.iterdir()) == [partial]
        (partial / "file").write_text("x")
        (partial / "file").chmod(0o600)
    (tmp_path / "plain").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    assert (tmp_path / "a" / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode, "it is for all who may read"
    (tmp_path / "plain").unlink()

    def fail():
        with atomic_folder(tmp_path / "b") as partial:
            (partial / "file").write_text("x")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_folder_does_not_replace_another(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()

    def write(name):
        with atomic_folder(tmp_path / name) as partial:
            (partial / "notes.txt").write_text("x")

    with pytest.raises(OSError, match="not empty"):
        write("a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_a_name_that_is_too_long_is_one_sentence(tmp_path, refusal):
    assert "File name too long" in refusal(Folder(tmp_path / ("a" * 300)).writing().__enter__)


def test_an_output_that_exists_is_refused(tmp_path, refusal):
    assert require_new(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in (".", "link"):
        assert "already exists" in refusal(require_new, tmp_path / name)
    assert refusal(require_new, tmp_path / "no" / "a") == f"there is no local folder {tmp_path / 'no'} to write a into"


def test_an_output_that_cannot_be_written(tmp_path, refusal):
    def write(path):
        with open_output(OutputTarget(epath.Path(path), "csv")) as file:
            file.write("x\n")

    write(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "x\n"
    assert refusal(write, tmp_path / "none" / "a.csv").startswith(f"cannot write {tmp_path / 'none' / 'a.csv'}: ")


# ------------------------------------------------------------------------------------------- names and links of others
@pytest.mark.parametrize("name", ["a.arrayrecord", ".hidden", "..a", "a b", "grün", "x" * 255])
def test_names_of_files(name):
    assert is_file_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a/", "a\0b", "\ud800", "x" * 256, 5, None, [""]])
def test_values_that_are_not_names_of_files(name):
    assert not is_file_name(name)


def test_a_link_under_a_temporary_name_is_not_followed(tmp_path, precious, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    storage.new_temporary(tmp_path).symlink_to(precious)
    with pytest.raises(FileExistsError), atomic_file(epath.Path(tmp_path / "a.bin")):
        pass


def test_output_does_not_follow_links(tmp_path, precious):
    (tmp_path / "p.csv").symlink_to(precious)
    with open_output(OutputTarget(epath.Path(tmp_path / "p.csv"), "csv")) as file:
        file.write("x\n")
    assert (tmp_path / "p.csv").read_text() == "x\n"
    assert not (tmp_path / "p.csv").is_symlink()


def test_files_are_only_appended_to_in_place(tmp_path, precious, refusal):
    with open_to_append(tmp_path / "a") as file:
        file.write(b"1\n")
    with open_to_append(tmp_path / "a") as file:
        file.write(b"2\n")
    assert (tmp_path / "a").read_text() == "1\n2\n"
    (tmp_path / "link").symlink_to(precious)
    assert refusal(open_to_append, tmp_path / "link") == f"{tmp_path / 'link'} is a symbolic link; remove it"
    with pytest.raises(FileNotFoundError):
        open_to_append(tmp_path / "none" / "a")


def test_a_folder_names_only_what_is_inside(tmp_path, precious, refusal):
    folder = Folder(tmp_path / "linked")
    (tmp_path / "real" / "eval").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "same").symlink_to("eval")
    (tmp_path / "real" / "out").symlink_to(precious.parent)
    (tmp_path / "real" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "real" / "round").symlink_to("round")
    for name in ("eval", "eval/new.json", "same/new.json", "new/er", "round"):
        assert str(folder.inside(name)) == f"{folder}/{name}"
    for name in ("..", "../real/eval", "eval/../..", "/etc/passwd", "", "eval//x"):
        sentence = f"{name!r} does not name a file in the folder {folder}; give a path below it"
        assert refusal(folder.inside, name) == sentence
    for name, real in (("out", precious.parent), ("out/notes.txt", precious), ("gone", tmp_path / "nowhere")):
        sentence = f"{folder}/{name} is a link out of the folder {folder}, to {real}; replace it by a copy"
        assert refusal(folder.inside, name) == sentence
    store = Folder("gs://bucket/set")
    assert str(store.inside("a/b")) == "gs://bucket/set/a/b"
    assert "does not name a file in" in refusal(store.inside, "../a")


def test_a_folder_is_written_to_only_if_no_entry_leads_out(tmp_path, precious, refusal):
    folder = Folder(tmp_path / "run")
    assert str(folder.writable_folder("checkpoints")) == f"{tmp_path}/run/checkpoints"
    (tmp_path / "run" / "checkpoints" / "8").mkdir(parents=True)
    folder.writable_folder("checkpoints")
    (tmp_path / "run" / "checkpoints" / "12").symlink_to(precious.parent)
    sentence = refusal(folder.writable_folder, "checkpoints")
    assert sentence.startswith(f"{folder}/checkpoints/12 is a link out of the folder {folder}")


def test_files_below_a_folder_are_named_and_none_is_outside(tmp_path, precious, refusal):
    folder = Folder(tmp_path / "run")
    for name in ("a", "b/c", "b/d/e"):
        folder.write_text(name, name)
    assert sorted(folder.files()) == ["a", "b/c", "b/d/e"]
    (tmp_path / "run" / "b" / "out").symlink_to(precious.parent)
    assert "b/out is a link out of" in refusal(list, folder.files())
