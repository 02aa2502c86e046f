"""A trace of some training steps (`--profile=START:STOP`), and a table of its most expensive operations.

The trace is in `profile/` of the run folder, where TensorBoard's profile plugin and xprof find it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.table import Column, Table

FOLDER = "profile"
MOST_STEPS = 100  # a step can have a hundred thousand events
MOST_ROWS = 10
_OPERATION, _DEVICE_LINE = "hlo_op", "XLA Ops"  # marks of a program's operations, on CPU and GPU, and on TPU
_SOURCE = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata={[^}]*op_name="([^"]*)"', re.MULTILINE)


@dataclass(frozen=True)
class Window:
    """The steps to trace, `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Return the steps of `START:STOP`; UserError unless these are at most MOST_STEPS steps in order."""
        numbers = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
        first, last = map(int, numbers.groups()) if numbers else (0, 0)
        if not 1 <= first <= last < first + MOST_STEPS:
            raise UserError(
                f"--profile={text} should be the first and the last step to trace, such as --profile=10:12; steps "
                f"count from 1, and at most {MOST_STEPS} are traced"
            )
        return cls(first, last)

    def require(self, step: int, total: int) -> None:
        """Raise UserError unless all steps are after `step`, the last step taken, and at most `total`."""
        if not step < self.first <= self.last <= total:
            raise UserError(
                f"--profile={self.first}:{self.last} is not within the remaining steps, {step + 1} to {total}"
            )


def print_trace(folder: RunFolder, window: Window, program: str) -> None:
    """Print the operations of the newest trace in a run folder. `program` is the text of the compiled step."""
    newest = max(Path(folder / FOLDER).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    traced = operations(ProfileData.from_file(str(newest)))
    status(operations_table(traced, window.last - window.first + 1, sources(program)).text())
    status(f"trace of steps {window.first} to {window.last}: {newest}")


def operations(data: ProfileData) -> dict[str, tuple[float, int]]:
    """Return {operation: (seconds, number of times)} of a trace, without the time of operations inside an operation."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for plane in data.planes:
        for line in plane.lines:
            events = [event for event in line.events if line.name == _DEVICE_LINE or _OPERATION in dict(event.stats)]
            for name, seconds in _own_times((event.name, event.start_ns, event.duration_ns) for event in events):
                totals[name][0] += seconds
                totals[name][1] += 1
    return {name: (seconds, int(count)) for name, (seconds, count) in totals.items()}


def _own_times(events: Iterable[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Return the name and the seconds of each (name, start, duration in ns), without the time of events inside it."""
    own: list[list[Any]] = []
    around: list[tuple[int, float]] = []  # index and end of the events that contain the current event
    for name, start, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while around and around[-1][1] <= start:
            around.pop()
        if around:
            own[around[-1][0]][1] -= duration / 1e9
        around.append((len(own), start + duration))
        own.append([name, duration / 1e9])
    return [(name, seconds) for name, seconds in own]


def sources(program: str) -> dict[str, str]:
    """Return {operation: its call in the model} of the text of a compiled program."""
    return dict(_SOURCE.findall(program))


def operations_table(totals: dict[str, tuple[float, int]], steps: int, origin: dict[str, str]) -> Table:
    """Return a table of the most expensive operations.

    Args:
      totals: result of `operations`.
      steps: number of steps in the trace.
      origin: result of `sources`.
    """
    total = sum(seconds for seconds, _ in totals.values())
    most_expensive = sorted(totals.items(), key=lambda item: -item[1][0])[:MOST_ROWS]
    columns = [
        Column("ms per step", "{:.2f}".format),
        Column("share", lambda share: f"{100 * share:.1f} %"),
        Column("times", "{:.3g}".format),
        Column("operation", align="<"),
        Column("from", align="<"),
    ]
    rows = [
        [1e3 * seconds / steps, seconds / total, count / steps, name, origin.get(name, "")]
        for name, (seconds, count) in most_expensive
    ]
    return Table(columns, rows)
