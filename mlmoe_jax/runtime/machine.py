"""The processor cores and the memory of this process, and whether it was forked from one that uses JAX.

A container may have fewer cores than its machine.
"""

import ctypes
import functools
import math
import os
from pathlib import Path

from mlmoe_jax.errors import UserError

# The quota and the period of a container in microseconds, in version 2 of Linux's control groups; "max" = no limit.
QUOTA = Path("/sys/fs/cgroup/cpu.max")
_forks: list[int] = []  # the ids of this process and those before it, up to one that uses JAX


def cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    It is the minimum of the CPU affinity and the quota of the cgroup, rounded up.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    quota, period = QUOTA.read_text().split() if QUOTA.is_file() else ("max", "1")
    limit = math.inf if quota == "max" else int(quota) / int(period)
    return max(1, math.ceil(min(allowed, limit)))


def return_freed_memory() -> None:
    """Return freed memory from glibc to the operating system. Do nothing if the C library is not glibc.

    glibc keeps freed memory in one arena per thread. Every save of a checkpoint starts threads, so the memory of a long
    training would otherwise grow.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def remember_forks() -> None:
    """Let `require_unforked` refuse the processes that are forked from this one, which uses JAX."""
    os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))


def require_unforked() -> None:
    """Raise UserError in a process that was forked from one that uses JAX, whose threads it would wait for."""
    if _forks:
        raise UserError(
            "this process was forked from one that uses JAX, and would wait for its threads for ever; start it with "
            'multiprocessing.get_context("spawn")'
        )
