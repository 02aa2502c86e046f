"""The processor cores and the memory of this process. A container may have fewer cores than its machine."""

import ctypes
import math
import os
from pathlib import Path

# The quota and the period of a container in microseconds, in version 2 of Linux's control groups; "max" = no limit.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Return the number of processor cores that this process may use, by its affinity and its quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    quota, period = QUOTA.read_text().split() if QUOTA.is_file() else ("max", "1")
    limit = math.inf if quota == "max" else int(quota) / int(period)
    return max(1, math.ceil(min(allowed, limit)))


def return_freed_memory() -> None:
    """Let glibc give freed memory back to the system. Does nothing on systems with another malloc.

    glibc keeps freed memory in an arena per thread. Every save of a checkpoint starts threads, so a long training
    would hold more and more of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
