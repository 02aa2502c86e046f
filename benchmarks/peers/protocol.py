"""A measured process, which reads one request per line and writes one answer per line, both JSON.

Only the standard library is imported, so that any interpreter can take part. A request is {"do": NAME, …}:

    facts                       versions and devices of the process
    build, case=CASE            prepare a program (compile it, fill its inputs), which replaces the previous program
    round                       time steps of the program, see `time_steps`
    memory                      bytes: peak of the process, and of the accelerator if it reports its peak
    call, name=NAME, …          call a function of the process
    drop                        release the program

A request that fails is answered by {"error": "reason"}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import io
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ROUND_SECONDS = 0.5  # a round takes at least two steps, and as many as fit into this time
MOST_STEPS = 200


@dataclass
class Program:
    """One program, ready to run.

    Attributes:
      step: starts a step, which may still be running when the function returns.
      wait: returns when all steps are complete.
      facts: numbers that are known before the first step, such as `compile_seconds`.
    """

    step: Callable[[], None]
    wait: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)


def time_steps(program: Program, seconds: float = ROUND_SECONDS) -> dict[str, float]:
    """Take at least three steps in a row, and return the mean seconds per step without the first step.

    The first step is slow if pages went back to the operating system while other programs ran. `user` and `system` are
    the CPU time of the process, all threads together.
    """
    began = time.perf_counter()
    program.step()
    program.wait()
    first = time.perf_counter() - began
    steps = min(MOST_STEPS, max(2, int(seconds / max(first, 1e-6))))
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(steps):
        program.step()
    program.wait()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "first": first,
        "seconds": wall / steps,
        "user": (after.ru_utime - before.ru_utime) / steps,
        "system": (after.ru_stime - before.ru_stime) / steps,
    }


def images_per_second(batches: Iterator, seconds: float, count: Callable[[Any], int] = len) -> dict[str, float]:
    """Return how many images a pipeline gives per second, after its first batch."""
    next(batches)
    began, images = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        images += count(next(batches))
    return {"images_per_second": images / (time.perf_counter() - began)}


def encoded_image() -> bytes:
    """Return a smooth JPEG of 640×480, the image that all sides classify."""
    import numpy as np
    from PIL import Image

    small, buffer = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def peak_rss() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Session:
    """Answers requests, with one program at a time.

    Args:
      facts: returns versions and devices.
      build: case -> program.
      device_peak: returns bytes, or None if the device does not report it.
      functions: the functions of the request `call`.
    """

    def __init__(
        self,
        facts: Callable[[], dict[str, Any]],
        build: Callable[[dict[str, Any]], Program],
        device_peak: Callable[[], int | None],
        functions: Sequence[Callable[..., dict[str, Any]]],
    ):
        self._facts, self._build, self._device_peak = facts, build, device_peak
        self._functions = {function.__name__: function for function in functions}
        self._program: Program | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, or {"error": "reason"}."""
        try:
            return self._answer(**request)
        except Exception as error:  # the client decides
            traceback.print_exc()
            reason = str(error).strip().splitlines() or [""]
            return {"error": f"{type(error).__name__}: {reason[0][:300]}"}

    def _answer(self, do: str, **arguments: Any) -> dict[str, Any]:
        match do:
            case "facts":
                return self._facts()
            case "build":
                self._drop()
                self._program = self._build(arguments["case"])
                return self._program.facts
            case "round":
                return time_steps(self._program)
            case "memory":
                return {"process": peak_rss(), "device": self._device_peak()}
            case "call":
                return self._functions[arguments.pop("name")](**arguments)
            case "drop":
                self._drop()
                return {}
        raise ValueError(f"no request is called {do!r}")

    def _drop(self) -> None:
        self._program = None
        gc.collect()


def serve(session: Session) -> None:
    """Answer the requests on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    for line in sys.stdin:
        answers.write(json.dumps(session.answer(json.loads(line))) + "\n")
        answers.flush()
