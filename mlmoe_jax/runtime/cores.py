"""The processor cores that this process may use; `os.cpu_count` counts those of the machine."""

import math
import os
from pathlib import Path

# The quota of a container in version 2 of Linux's control groups, and in version 1: (quota, period) in microseconds.
QUOTA = Path("/sys/fs/cgroup/cpu.max")
OLD_QUOTA = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def cores() -> int:
    """Return the number of processor cores that this process may use, at least 1: its affinity, and its quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    return max(1, math.ceil(min(allowed, _quota())))


def _quota() -> float:
    """Return the cores that the control group of this process may keep busy; infinite without a limit."""
    try:
        text = QUOTA.read_text() if QUOTA.exists() else " ".join(path.read_text() for path in OLD_QUOTA)
        quota, period = map(int, text.split())
    except (OSError, ValueError):  # no control groups, or "max", which is no limit
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf
