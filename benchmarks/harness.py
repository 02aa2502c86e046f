"""Processes, paired rounds, stored results and tables for all suites of `benchmarks.run`.

This process never imports jax or torch, so that each measured process has the accelerator for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, progress
from mlmoe_jax.apps.cli.environment import LARGE_PAGES, TUNABLES
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Table

FLAGS, WIDE_VECTORS = "XLA_FLAGS", "--xla_cpu_prefer_vector_width=512"  # as the package sets for its programs
PEERS = ROOT / "benchmarks" / "peers"
MUCH_SYSTEM = 0.1  # share of system time in CPU time above which a result is marked
MARK = "†"


class Failed(Exception):
    """A request that a measured process refused, with its reason."""


# --------------------------------------------------------------------------------------------------------- processes
@dataclass(frozen=True)
class Side:
    """A compared program.

    Attributes:
      name: the column of the program.
      command: starts its process.
      environment: the environment of the process.
      options: added to its cases.
      checkout: the checkout of this package; None = another program.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    checkout: Path | None = None

    @property
    def ours(self) -> bool:
        """Whether the program is a checkout of this package."""
        return self.checkout is not None


def our_side(name: str, python: str = sys.executable, checkout: Path = ROOT) -> Side:
    """Return a checkout of this package in an interpreter. It runs its own worker, because modules may have moved."""
    added = {"PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    worker = checkout / "benchmarks" / "peers" / "jax_worker.py"
    return Side(name, (python, str(worker)), _environment() | added, {}, checkout)


def torch_side(python: str, *, compiled: bool) -> Side:
    """Return the PyTorch twin in an interpreter, eager or compiled."""
    name = "PyTorch, compiled" if compiled else "PyTorch"
    # PyTorch has no such blocks as those for which `LARGE_PAGES` also sets a threshold.
    environment = _environment("glibc.malloc.hugetlb=1")
    return Side(name, (python, str(PEERS / "torch_worker.py")), environment, {"compile": compiled})


def _environment(tunables: str = LARGE_PAGES) -> dict[str, str]:
    """Return the environment of every measured process, with large pages and wide vectors as for the program."""
    # Two processes share the accelerator, so JAX must not take most of its memory at once.
    given = {TUNABLES: tunables, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(os.environ)
    flags = given.get(FLAGS, "")  # for kernels outside a step too, and for older checkouts
    return given | {FLAGS: flags if WIDE_VECTORS.split("=")[0] in flags else f"{flags} {WIDE_VECTORS}".strip()}


class Worker:
    """A measured process; see peers/protocol.py."""

    def __init__(self, side: Side, log: Any = subprocess.DEVNULL):
        self.side = side
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            side.command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=side.environment
        )
        try:
            self.facts = self.ask("facts")
        except Failed:
            self.close()
            raise

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a request; Failed if the process refuses it or has ended."""
        try:
            self._process.stdin.write(json.dumps({"do": request, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(f"{self.side.name} ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def build(self, case: dict[str, Any]) -> dict[str, Any]:
        return self.ask("build", case=case | self.side.options)

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return self.ask("call", name=name, **arguments)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            pass

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Workers:
    """The processes of all sides, which start on first use and serve further cases."""

    def __init__(self, sides: Sequence[Side], log: Any = subprocess.DEVNULL):
        self.sides, self._log, self._running = list(sides), log, {}

    @property
    def ours(self) -> list[Side]:
        """The sides that are checkouts of this package."""
        return [side for side in self.sides if side.ours]

    def of(self, side: Side) -> Worker:
        """Return the process of a side."""
        if side.name not in self._running:
            self._running[side.name] = self.fresh(side)
        return self._running[side.name]

    def fresh(self, side: Side) -> Worker:
        """Return a new process of a side, which the caller closes."""
        return Worker(side, self._log)

    def alone(self, side: Side, measured: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
        """Return what a function measures with a new process of a side and what is given, or its `error`."""
        with self.fresh(side) as worker:
            try:
                return measured(worker, *given)
            except Failed as failed:
                return {"error": str(failed)}

    def discard(self, side: Side) -> None:
        """End the process of a side, if it runs; the next case starts a new process."""
        if worker := self._running.pop(side.name, None):
            worker.close()

    def close(self) -> None:
        for worker in self._running.values():
            worker.close()
        self._running = {}


# ------------------------------------------------------------------------------------------------------------ rounds
def rounds_of(workers: Workers, sides: Sequence[Side], case: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Measure a case on all sides in alternating rounds; return side -> facts and `rounds`, or `error`.

    All sides are prepared before the first round. A round takes several steps in a row on each side, see
    `protocol.time_steps`; the order is reversed from round to round.
    """
    outcomes = _built(workers, sides, case)
    if any("error" in result for result in outcomes.values()):
        workers.close()  # earlier cases may still occupy memory of an accelerator
        outcomes = _built(workers, sides, case)
    running = [side for side in sides if "error" not in outcomes[side.name]]
    for number in range(rounds):
        for side in running[:: 1 if number % 2 == 0 else -1]:
            try:
                outcomes[side.name]["rounds"].append(workers.of(side).ask("round"))
            except Failed as failed:
                workers.discard(side)
                outcomes[side.name] = {"error": str(failed)}
        running = [side for side in running if "error" not in outcomes[side.name]]
    for side in running:
        workers.of(side).ask("drop")
    return outcomes


def _built(workers: Workers, sides: Sequence[Side], case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    outcomes: dict[str, dict[str, Any]] = {}
    for side in sides:
        try:
            outcomes[side.name] = {**workers.of(side).build(case), "rounds": []}
        except Failed as failed:
            workers.discard(side)
            outcomes[side.name] = {"error": str(failed)}
    return outcomes


@dataclass(frozen=True)
class Spread:
    """The median, the minimum and the maximum of values."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 3) -> str:
        return f"{number(self.median, digits)} ({number(self.least, digits)} … {number(self.most, digits)})"


def seconds(result: dict[str, Any]) -> Spread:
    """Return the seconds per step of a side's result."""
    return Spread.of(one["seconds"] for one in result["rounds"])


def ratio(result: dict[str, Any], base: dict[str, Any]) -> Spread:
    """Return how many times as fast as `base` a side is, from pairs of rounds."""
    pairs = zip(result["rounds"], base["rounds"], strict=True)
    return Spread.of(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)


def mark(result: dict[str, Any]) -> str:
    """Return MARK if much of the CPU time is system time, so that the result means little."""
    user, system = (sum(one[kind] for one in result["rounds"]) for kind in ("user", "system"))
    return MARK if system > MUCH_SYSTEM * (user + system) else ""


# ----------------------------------------------------------------------------------------------------------- results
def machine() -> dict[str, Any]:
    """Return generic facts about the host: processor, cores, memory, operating system."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


class Results:
    """Measured rows by key in a JSON file, with which a new run continues a stopped run.

    Each row is stored at once. A row is measured again only with `again`; no row starts after `until` (of
    time.monotonic), and `left_out` has the names of those that did not.
    """

    def __init__(self, path: Path | None, *, again: bool = False, until: float = float("inf")):
        self.path, self.again, self.until = path, again, until
        self.machine, self.rows, self.left_out, self._fresh = machine(), {}, [], set()
        if path and path.exists():
            stored = json.loads(path.read_text())
            if stored["machine"] != self.machine:
                raise SystemExit(f"{path} holds results of another machine ({stored['machine']}); name another --json")
            self.rows = stored["rows"]

    def measure(self, suite: str, key: str, measured: Callable[..., dict[str, Any]], *given: Any) -> dict | None:
        """Return the stored row of a key, or call a function with what is given and store it; None without time."""
        name = f"{suite}: {key}"
        if name in self.rows and (not self.again or name in self._fresh):
            return self.rows[name]
        if time.monotonic() >= self.until:
            self.left_out.append(name)
            return None
        progress(f"measuring {name}")
        self.rows[name] = measured(*given)
        self._fresh.add(name)
        if self.path:
            text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=1)
            Folder(self.path.parent).write_text(self.path.name, text)
        return self.rows[name]


# ------------------------------------------------------------------------------------------------------------ tables
def number(value: float, digits: int = 3) -> str:
    """Return a number with some significant digits and without exponent: 0.0123, 1.23, 123, 12,346."""
    if not value:
        return "0"
    size = f"{abs(value):.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - int(size.partition('e')[2]))}f}"


def gigabytes(count: float | None) -> str:
    """Return bytes in GB."""
    return "" if count is None else f"{count / 1e9:.2f}"


def cells_of(outcome: dict[str, Any], cells: Callable[..., list[str]], *given: Any) -> list[str]:
    """Return the cells that a function makes of an outcome and what is given, or the error of the outcome."""
    return [outcome["error"]] if "error" in outcome else cells(outcome, *given)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a Markdown table with a title, or "" without rows; the cells that a row lacks at its end are empty."""
    if not rows:
        return ""
    lines = [f"**{title}**", "", Table(columns, rows).markdown()]
    return "\n".join([*lines, *notes, ""] if notes else lines)


def platform_of(facts: dict[str, Any]) -> str:
    """Return "cpu", "gpu" or "tpu"."""
    name = facts["platform"]
    return "gpu" if name in ("cuda", "rocm") else name


def describe_process(facts: dict[str, Any]) -> str:
    """Return the devices and versions of a measured process on one line."""
    kinds = facts["devices"]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return f"{len(kinds)} × {kinds[0]}; {packages}"
