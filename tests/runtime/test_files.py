"""The cache folder, and the errors of full, read-only and failing disks."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.commands import assert_sentence
from helpers.tables import SPREADSHEET

from mlmoe_jax.errors import DISK_ERROR, DiskError, UserError
from mlmoe_jax.runtime import files
from mlmoe_jax.runtime.files import cache_folder, make_cache


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("MLMOE_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "mlmoe_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "home" / ".cache" / "mlmoe_jax"


def test_a_cache_that_cannot_be_made_is_refused(tmp_path, refusal, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "tar", "Not a directory")):
        says = f"cannot make {folder} for the cache: {reason}; let MLMOE_CACHE name another folder"
        assert refusal(make_cache, folder) == says
    with monkeypatch.context() as patch:
        patch.setattr(os, "makedirs", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(DiskError, match="cannot write x: Permission denied"):
            make_cache("x")
    make_cache(tmp_path / "a" / "b")
    make_cache(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


# ----------------------------------------------------------------------------------------------------------------- text
ARCHIVE, BINARY, ENCODING = "is a spreadsheet or another archive, not", "is a binary file, not", "is not UTF-8; save it"


def read_lines(path):
    with files.open_text(path) as file:
        return list(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (SPREADSHEET, ARCHIVE),
        (b"PK\3\4\x0a\0\0\0\0\0\0\0!\0mimetypeapplication/vnd.oasis.opendocument.spreadsheet", ARCHIVE),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(60), ARCHIVE),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", BINARY),
        (b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1", BINARY),
        (b"\x1f\x8b\x08\0\0\0\0\0", BINARY),
        (b"\x93NUMPY\1\0v\0{'descr'", BINARY),
        (b"PAR1\x15\4\x15\0", BINARY),
        (b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n", BINARY),
        (b"SQLite format 3\0\x10\0\1\1", BINARY),
        (b"train/1.png" + bytes(90), BINARY),  # a tar file
        (b"a,b\n" * 9999 + b"\xe9", ENCODING),
        ("zażółć,x".encode("utf-16"), ENCODING),
        ("red,x".encode("utf-16-le"), ENCODING),
        ("red,x".encode("utf-16-be"), ENCODING),
    ],
)
def test_a_file_that_is_no_text_is_named(content, says, tmp_path):
    (path := tmp_path / "x").write_bytes(content)
    for read in (files.read_text, read_lines):
        with pytest.raises(UserError, match=says) as caught, files.damage_explained(path):
            read(path)
        assert_sentence(str(caught.value))


def test_text_may_have_a_mark_and_control_characters(tmp_path):
    (path := tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\x1b[0m\t\xc3\xa9\r\nb\f")
    assert files.read_text(path) == "a\x1b[0m\té\r\nb\f"
    with files.open_text(path) as file:
        assert file.read() == files.read_text(path)


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
