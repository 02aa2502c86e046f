"""Jobs of several local processes, and the files that they write."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from mlmoe_jax.runs.digests import read

SPLITS = {"train": 24, "val": 11, "test": 13}  # neither 11 nor 13 divides by 2 or 3 processes
BROKEN = {"train": (3, 21), "test": (6,)}  # images that no process can read


@dataclass
class Job:
    """Running processes and their output."""

    processes: list[subprocess.Popen]
    output: Path

    def wait(self, seconds: float = 300) -> list[int]:
        """Return the exit codes once all have ended."""
        end = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(self.messages(number) for number in range(len(self.processes)))) from None

    def printed(self, number: int) -> str:
        return (self.output / f"{number}.out").read_text()

    def messages(self, number: int) -> str:
        return (self.output / f"{number}.err").read_text()


def rows(folder: Path) -> list[dict]:
    """Return the rows of metrics.jsonl written so far."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(condition, seconds: float = 240) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def digests(folder: Path, step: int) -> dict:
    """Return the sha256 of every array of a checkpoint, or of its shards."""
    return read(folder / "checkpoints" / str(step) / "digests")


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of the finished checkpoints."""
    found = (folder / "checkpoints").glob("*") if (folder / "checkpoints").exists() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())
