"""The processor cores and the memory of this process. A container may have fewer cores than its machine."""

import ctypes
import math
import os
from pathlib import Path

# The quota and the period of a container in microseconds, in version 2 of Linux's control groups; "max" = no limit.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


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
