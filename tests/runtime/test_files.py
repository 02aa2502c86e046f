"""Files that have no end or are none, the cache folder, and full, read-only and failing disks."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlmoe_jax.errors import DISK_ERROR, DiskError, UserError
from mlmoe_jax.runtime import files
from mlmoe_jax.runtime.files import cache_folder, open_regular, read_bytes, read_stream
from mlmoe_jax.runtime.storage import Folder


@pytest.fixture(params=["pipe", "socket", "device", "folder", "long name", "NUL", "surrogate", "store"])
def no_file(request, tmp_path, monkeypatch):
    """A path that no regular file has."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    if request.param == "pipe":
        os.mkfifo("x")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("x")
            yield "x"
            return
    elif request.param == "folder":
        os.mkdir("x")
    names = {"device": "/dev/zero", "long name": "x" * 5000, "NUL": "a\0b", "surrogate": "\ud800"}
    yield {**names, "store": "nosuchstore://x/y"}.get(request.param, "x")


def test_only_regular_files_are_read(no_file):
    with pytest.raises(OSError) as raised:  # noqa: PT011
        read_bytes(no_file, 10)
    assert raised.value.strerror


def test_a_file_has_a_limit_of_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(path, 4)
    os.truncate(path, 40 << 30)  # without taking space
    with pytest.raises(OSError, match="more than 536,870,912 bytes"):
        read_bytes(path, files.MOST_TEXT)
    with open_regular("/proc/self/maps") as file, pytest.raises(OSError, match="more than 4 bytes"):
        read_stream(file, 4)  # its size is stated as 0


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("MLMOE_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "mlmoe_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "home" / ".cache" / "mlmoe_jax"


# ---------------------------------------------------------------------------------------------------------------- disks
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free disk space and repeat the same command"),
        (errno.EACCES, "make it writable or name another folder"),
        (errno.EIO, "check the disk and repeat the same command"),
    ],
)
def test_the_sentence_names_the_file_the_reason_and_the_remedy(number, remedy):
    reason = os.strerror(number)
    named = files.disk_error(OSError(number, reason, "/data/x.csv"))
    assert str(named) == f"cannot write /data/x.csv: {reason}; {remedy}"
    assert named.exit_code == DISK_ERROR
    # as TensorStore and ArrayRecord report it, and as the cause of something else
    other = ValueError(f'RESOURCE_EXHAUSTED: Failed writing: "d/8": {reason} [os_error_code=x]')
    outer = RuntimeError("a thread failed")
    outer.__cause__ = other
    assert str(files.disk_error(outer, "/run/checkpoints")) == f"cannot write /run/checkpoints: {reason}; {remedy}"


def test_other_errors_stay():
    reason = os.strerror(errno.EACCES)
    for other in (OSError(errno.ENOENT, "No such file"), ValueError("x"), UserError(f"cannot read a: {reason}")):
        assert files.disk_error(other) is None
        with pytest.raises(type(other)), files.disk_errors_explained("x"):
            raise other
    known = DiskError("cannot write a")
    assert files.disk_error(known, "b") is known


def test_a_partial_file_is_removed_and_the_old_one_kept(tmp_path, refusal):
    folder = Folder(tmp_path)
    folder.write_text("a.txt", "old")
    program = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from mlmoe_jax.errors import DiskError
from mlmoe_jax.runtime.storage import Folder
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Folder({str(tmp_path)!r}).write_text("a.txt", 2000 * "x")
except DiskError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot write {tmp_path / 'a.txt'}: File too large; free disk space")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "old"}
