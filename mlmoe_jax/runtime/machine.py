"""The processor cores and the memory of this process. A container may have fewer cores than its machine."""

import ctypes
import math
import os
from pathlib import Path

# The limits of a container in version 2 of Linux's control groups.
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # quota and period in microseconds
# Quota and period in version 1.
OLD_QUOTA = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def cores() -> int:
    """Return the number of processor cores that this process may use, by its affinity and its quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    quota, period = _numbers(QUOTA) or _numbers(*OLD_QUOTA) or (0, 0)
    limit = quota / period if quota > 0 and period > 0 else math.inf
    return max(1, math.ceil(min(allowed, limit)))


def return_freed_memory() -> None:
    """Let glibc give freed memory back to the system. Does nothing on systems with another malloc.

    glibc keeps freed memory in an arena per thread. Every save of a checkpoint starts threads, so a long training
    would hold more and more of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _numbers(*paths: Path) -> tuple[int, int] | None:
    """Return the two numbers in files; None if a file is missing or says "max" (no limit)."""
    try:
        first, second = map(int, " ".join(path.read_text() for path in paths).split())
    except (OSError, ValueError):
        return None
    return first, second
