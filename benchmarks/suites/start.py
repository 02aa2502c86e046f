"""start: seconds from a command to its help, its first step and its first prediction, with a cold and a warm cache."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.suites.cases import Settings
from benchmarks.suites.photos import labeled_folder, photo_files, small_training

LONGEST = 600.0  # seconds to wait for a first step
WHAT = {"help": "--help", "step": "first step, its metrics written", "predict": "--mode=predict of one image"}


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return a table with one row per command, cache and checkout of this package."""
    workers.close()  # a TPU belongs to one process
    rows = []
    for side in workers.ours:
        outcome = results.measure("start", side.name, _measured, settings, side)
        for name, values in (outcome or {}).items():
            what, _, cache = name.partition(" ")
            rows.append([WHAT[what], cache, side.name, harness.Spread.of(values).text()])
    return [harness.table("The start, seconds", ("command", "cache", "side", "seconds"), rows)]


def _measured(settings: Settings, side: harness.Side) -> dict[str, list[float]]:
    """Return "COMMAND CACHE" -> seconds of each round."""
    seconds: dict[str, list[float]] = {}
    rounds = 1 if settings.quick else max(2, settings.rounds // 2)
    with contextlib.ExitStack() as stack:
        (photo, *_) = stack.enter_context(photo_files(settings, 1))
        reference, keys = "mlvpt_digits", {"train.log_every": "1"}
        if settings.quick:
            reference, keys = small_training(stack.enter_context(labeled_folder(settings, 16)))
        for _ in range(rounds):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            program = _Program(side, place)
            seconds.setdefault("help ", []).append(program.completed("--help"))
            for cache in ("cold",) if settings.quick else ("cold", "warm"):
                run_folder = place / cache
                flags = [f"--config={reference}", *(f"--config.{key}={value}" for key, value in keys.items())]
                seconds.setdefault(f"step {cache}", []).append(program.first_step(run_folder, *flags))
                predicts = ["--mode=predict", f"--workdir={run_folder}", f"--images={photo}"]
                needed = program.completed(*predicts, f"--output={place}/out.csv")
                seconds.setdefault(f"predict {cache}", []).append(needed)
    return seconds


class _Program:
    """The command line of a side, with caches in its own folder."""

    def __init__(self, side: harness.Side, place: Path):
        self._checkout = side.checkout
        self._command = [side.command[0], "-m", "mlmoe_jax.main"]
        caches = dict.fromkeys(("XDG_CACHE_HOME", "MLMOE_CACHE"), str(place))
        self._environment = side.environment | caches | {"JAX_COMPILATION_CACHE_DIR": str(place / "jax")}

    def completed(self, *arguments: str) -> float:
        """Return the seconds of a command; Failed unless it succeeds."""
        process, began = self._start(*arguments), time.perf_counter()
        _, errors = process.communicate()
        self._require(process.returncode, errors)
        return time.perf_counter() - began

    def first_step(self, folder: Path, *arguments: str) -> float:
        """Return the seconds until a training has written its first metrics; then stop it, which saves a checkpoint."""
        log = folder / "metrics.jsonl"
        process, began = self._start(f"--workdir={folder}", *arguments), time.perf_counter()
        _until(lambda: process.poll() is not None or (log.exists() and "\n" in log.read_text()))
        reached = time.perf_counter() - began
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
        if not log.exists():
            self._require(process.returncode, errors)
        return reached

    def _start(self, *arguments: str) -> subprocess.Popen:
        # `python -m` searches the working directory first
        where = {"env": self._environment, "cwd": self._checkout}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*self._command, *arguments], **where, **quiet)

    def _require(self, code: int, errors: str) -> None:
        if code:
            raise harness.Failed(f"the program ended with code {code}: {errors.strip().splitlines()[-1]}")


def _until(holds: Callable[[], Any]) -> None:
    until = time.monotonic() + LONGEST
    while not holds():
        if time.monotonic() > until:
            raise harness.Failed(f"no first step within {LONGEST:.0f} s")
        time.sleep(0.005)
