"""The processor time and the memory of a program, with all processes that it starts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlmoe_jax.errors import UserError

INTERVAL = 1.0  # seconds between two looks at the memory


@dataclass(frozen=True)
class Usage:
    """What a program needed.

    Attributes:
      cpu_seconds: of all its processes and threads.
      peak_mib: the largest sum of the proportional set sizes of its processes.
    """

    cpu_seconds: float
    peak_mib: float


def run_measured(command: Sequence[str], environment: Mapping[str, str], output: Path) -> Usage:
    """Run a program, whose output is written to a file, and return what it needed; UserError if it fails."""
    with output.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    peak, ended = 0, 0
    while not ended:
        peak = max(peak, resident(process.pid))
        time.sleep(INTERVAL)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{' '.join(command)} ended with exit code {process.returncode}; {output} has its output")
    return Usage(round(used.ru_utime + used.ru_stime, 1), round(peak / 2**20))


def resident(pid: int) -> int:
    """Return the bytes of memory of a process and of its descendants; pages that several share count once."""
    total = 0
    with contextlib.suppress(psutil.Error):  # it has ended
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total
