"""Errors of full, read-only and failing disks."""

import errno
import os
import subprocess
import sys

import pytest

from mlmoe_jax.errors import NO_ROOM, NoRoom, UserError
from mlmoe_jax.runtime import files
from mlmoe_jax.runtime.storage import Folder


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room and repeat the same command"),
        (errno.EDQUOT, "make room and repeat the same command"),
        (errno.EROFS, "make it writable or name another folder"),
        (errno.EACCES, "make it writable or name another folder"),
        (errno.EIO, "check the disk and repeat the same command"),
    ],
)
def test_the_sentence_names_the_file_the_reason_and_the_remedy(number, remedy):
    reason = os.strerror(number)
    named = files.no_room(OSError(number, reason, "/data/x.csv"))
    assert str(named) == f"cannot read or write /data/x.csv: {reason}; {remedy}"
    assert named.exit_code == NO_ROOM
    # as TensorStore and ArrayRecord report it, and as the cause of something else
    other = ValueError(f'RESOURCE_EXHAUSTED: Failed writing: "d/8": {reason} [os_error_code=x]')
    outer = RuntimeError("a thread failed")
    outer.__cause__ = other
    assert str(files.no_room(outer, "/run/checkpoints")) == f"cannot write /run/checkpoints: {reason}; {remedy}"


def test_other_errors_stay():
    reason = os.strerror(errno.EACCES)
    for other in (OSError(errno.ENOENT, "No such file"), ValueError("x"), UserError(f"cannot read a: {reason}")):
        assert files.no_room(other) is None
        with pytest.raises(type(other)), files.full_disk_explained("x"):
            raise other
    known = NoRoom("cannot write a")
    assert files.no_room(known, "b") is known


def test_a_partial_file_is_removed_and_the_old_one_kept(tmp_path, refusal):
    folder = Folder(tmp_path)
    folder.write_text("a.txt", "old")
    program = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from mlmoe_jax.errors import NoRoom
from mlmoe_jax.runtime.storage import Folder
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Folder({str(tmp_path)!r}).write_text("a.txt", 2000 * "x")
except NoRoom as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot write {tmp_path / 'a.txt'}: File too large; make room")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "old"}


def test_partial_files_of_killed_processes_are_removed(tmp_path):
    for name in (".a.csv.tmp", ".b.csv.123.tmp"):  # the second belongs to a process that needs no lock
        (tmp_path / name).touch()
    with Folder(tmp_path).writing():
        assert sorted(path.name for path in tmp_path.iterdir()) == [".b.csv.123.tmp", ".lock"]


def test_output_to_a_full_disk_has_a_sentence():
    command = [sys.executable, "-m", "mlmoe_jax.main", "--help=optim.b1"]
    with open("/dev/full", "w") as full:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert done.returncode == NO_ROOM
    assert done.stderr == (
        "error: cannot write standard output: No space left on device; make room and repeat the same command\n"
    )
