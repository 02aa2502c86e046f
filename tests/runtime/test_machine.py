import os
import platform

import psutil
import pytest

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import machine
from mlmoe_jax.runtime.machine import cores, require_unforked
from mlmoe_jax.runtime.sharding import make_mesh


@pytest.fixture
def group(tmp_path, monkeypatch):
    """The folder of a control group, without files, of a process that may run on 16 cores."""
    monkeypatch.setattr(machine, "QUOTA", tmp_path / machine.QUOTA.name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 2), ("9000000 100000", 16)]
)
def test_a_container_has_the_cores_of_its_quota(group, text, expected):
    (group / "cpu.max").write_text(f"{text}\n")
    assert cores() == expected


def test_a_process_that_is_bound_to_cores_has_only_these(group, monkeypatch):
    assert cores() == 16, "without control groups"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert cores() == 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
def test_freed_memory_is_returned_to_the_system():
    process, mib = psutil.Process(), 2**20
    held = [bytes(1000) for _ in range(100_000)]
    end = bytes(1000)  # in use above the others, so that malloc alone returns none of them
    filled = process.memory_info().rss
    del held
    machine.return_freed_memory()
    assert filled - process.memory_info().rss > 60 * mib
    assert len(end) == 1000


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:This process:DeprecationWarning")
def test_a_process_that_is_forked_from_one_with_jax_is_refused():
    make_mesh({"fsdp": 1, "expert": 1})
    require_unforked()
    if not (child := os.fork()):
        try:
            require_unforked()
        except UserError as error:
            os._exit(7 if "forked from one that uses JAX" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    require_unforked()
