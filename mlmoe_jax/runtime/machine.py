"""The processor cores and the memory that this process may use; a container has less than its machine."""

import ctypes
import math
import os
from pathlib import Path

import psutil

# The limits of a container in version 2 of Linux's control groups.
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # quota and period in microseconds
MEMORY = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
MEMORY_KINDS = Path("/sys/fs/cgroup/memory.stat")
# The quota and its period in version 1.
OLD_QUOTA = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def cores() -> int:
    """Return the number of processor cores that this process may use, at least 1: its affinity, and its quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    quota, period = _numbers(QUOTA) or _numbers(*OLD_QUOTA) or (0, 0)
    limit = quota / period if quota > 0 and period > 0 else math.inf
    return max(1, math.ceil(min(allowed, limit)))


def free_memory() -> int:
    """Return the bytes of memory that this process can still fill without swapping."""
    available = psutil.virtual_memory().available
    if limited := _numbers(*MEMORY):
        most, current = limited
        available = min(available, most - current + _cached_files())
    return max(0, available)


def return_freed_memory() -> None:
    """Return to the system what this process has freed and malloc keeps; without effect on malloc other than glibc's.

    glibc keeps freed memory in an arena per thread. Every save of a checkpoint starts threads, so that a long training
    would hold more and more of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cached_files() -> int:
    """Return the bytes of files that the container keeps in memory and gives up first."""
    try:
        kinds = dict(line.split() for line in MEMORY_KINDS.read_text().splitlines())
        return int(kinds["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _numbers(*paths: Path) -> tuple[int, int] | None:
    """Return the two numbers in files; None without such files, or if one says "max" for no limit."""
    try:
        first, second = map(int, " ".join(path.read_text() for path in paths).split())
    except (OSError, ValueError):
        return None
    return first, second
