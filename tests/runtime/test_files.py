"""The cache folder, and the errors of full, read-only and failing disks."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlmoe_jax.errors import DISK_ERROR, DiskError
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
