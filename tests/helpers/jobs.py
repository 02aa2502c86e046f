"""Jobs of several local processes."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


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


def until(condition, seconds: float = 240) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
