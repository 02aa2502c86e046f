"""The cache folder, and the errors of full, read-only and failing disks."""

import errno
import os
from pathlib import Path

import pytest

from mlmoe_jax.errors import DISK_ERROR
from mlmoe_jax.runtime import files
from mlmoe_jax.runtime.files import cache_folder


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
