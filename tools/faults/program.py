"""The program under test of `tools.faults`: a tiny training, with a fault at a chosen moment.

Each start is a process that is forked from a process with all imports, or with `fresh` started anew. With the
environment variable FAULT="MOMENT SIGNAL COUNT", it sends itself a signal when a moment comes for the COUNT-th time.
"""

import dataclasses
import importlib.abc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from mlmoe_jax.apps.cli.environment import LARGE_PAGES, TUNABLES

COMMAND = (
    "--config=mlvpt_digits",
    "--config.model.backbone.weights=none",
    "--config.data.test_splits=test",
    "--config.train.epochs=2",
    "--config.train.batch_size=20",
    "--config.train.log_every=1",
    "--config.eval.batch_size=40",
    "--config.checkpoint.every_epochs=0.5",
    "--config.eval.every_epochs=1",
    "--config.thresholds.at_end=True",
)
SCENES = {"train": 80, "val": 60, "test": 40, "test_shift": 40}  # 2 epochs of 4 steps; 50 are calibrated on
LIMIT = 300  # seconds that one start may take
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "MLMOE_OFFLINE": "1",
    TUNABLES: LARGE_PAGES,  # as for the program
}


@dataclass(frozen=True)
class Ended:
    """The end of a start: exit code (negative: the signal that killed it) and both outputs."""

    code: int
    text: str

    def __str__(self) -> str:
        """Return the exit code and the end of the outputs."""
        return f"exit code {self.code}: {self.text[-300:]}"

    @property
    def one_sentence(self) -> bool:
        """Whether it ended with an error of one sentence, without a traceback."""
        errors = [line for line in self.text.splitlines() if line.startswith("error: ")]
        return len(errors) == 1 and ". " not in errors[0] and self.quiet

    @property
    def quiet(self) -> bool:
        """Whether nothing in the output looks like a traceback."""
        return not any(word in self.text for word in ("Traceback", "Exception ignored", "ERROR:absl", "ERROR:asyncio"))


def use_environment(place: Path) -> None:
    """Set the environment of the tiny program, with its caches in `place`."""
    os.environ.update(_ENVIRONMENT, MLMOE_CACHE=str(place / "cache"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(place / "compiled"))


class Program:
    """Starts the tiny program in its own folder."""

    def __init__(self, place: Path):
        self.place = place
        use_environment(place)
        self.photo = place / "photos" / "0.png"
        self.photo.parent.mkdir()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(self.photo)

    def train(self, folder: Path, fault: str = "", **options) -> Ended:
        return self((*COMMAND, f"--workdir={folder}"), fault, **options)

    def __call__(self, arguments: Sequence[str], fault: str = "", *, fresh: bool = False, after: float = 0) -> Ended:
        """Run one command; it gets the signal of `fault` after `after` seconds, for the moment "clock"."""
        return self.start(arguments, fault, fresh=fresh).wait(fault if after else "", after)

    def start(self, arguments: Sequence[str], fault: str = "", *, fresh: bool = False) -> "Started":
        """Start one command, and do not wait for its end."""
        start, output = self._fresh if fresh else self._forked, tempfile.TemporaryFile()  # noqa: SIM115
        return Started(start(list(map(str, arguments)), fault, output.fileno()), output)

    def _fresh(self, arguments: list[str], fault: str, output: int) -> int:
        command = [sys.executable, "-m", "tools.faults.program", *arguments]
        return subprocess.Popen(command, env=os.environ | {"FAULT": fault}, stdout=output, stderr=output).pid

    def _forked(self, arguments: list[str], fault: str, output: int) -> int:
        import mlmoe_jax.main
        import mlmoe_jax.training.loop  # noqa: F401 (imported once for all children)

        sys.stdout.flush()
        with warnings.catch_warnings(action="ignore"):  # JAX is imported, but has not started its threads
            child = os.fork()
        if child:
            return child
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = run(arguments, fault)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class Started:
    """A command that runs, with the file of both its outputs."""

    process: int
    output: BinaryIO

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)

    def wait(self, fault: str = "", after: float = 0) -> Ended:
        """Wait for the end; the command gets the signal of `fault` after `after` seconds."""
        with self.output as output:
            code = _wait(self.process, fault, after)
            output.seek(0)
            return Ended(code, output.read().decode(errors="replace"))


def _wait(process: int, fault: str, after: float) -> int:
    started, due = time.monotonic(), bool(fault)
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if due and time.monotonic() - started > after:
            os.kill(process, int(fault.split()[1]))
            due = False
        if time.monotonic() > started + LIMIT:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------- in the program
def run(arguments: list[str], fault: str) -> int:
    """Run `mlmoe_jax.main` on few scenes and with a tiny backbone, with a fault if there is one."""
    if fault.startswith("import "):
        sys.meta_path.insert(0, _AtImport("orbax", _injector(fault)))  # `main` imports it
    from mlmoe_jax.data.sources import digits
    from mlmoe_jax.models.backbones import catalog

    digits.SCENES = SCENES
    entry = catalog.CATALOG["vit_digits"]
    shape = dataclasses.replace(entry.shape, width=16, depth=1, heads=2, patch=32)
    catalog.CATALOG["vit_digits"] = dataclasses.replace(entry, shape=shape)
    from mlmoe_jax.apps.cli.process import quiet_libraries
    from mlmoe_jax.main import main

    if fault and fault.split()[0] not in ("clock", "import"):
        _prepare(fault.split()[0], _injector(fault))
    quiet_libraries()
    return main(arguments)


def _injector(fault: str) -> Callable[[], None]:
    """Return a function that injects a fault when it is called for the COUNT-th time."""
    _, number, count = fault.split()
    remaining = int(count)

    def inject() -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            os.kill(os.getpid(), int(number))

    return inject


class _AtImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, inject: Callable[[], None]):
        self.name, self.inject = name, inject

    def find_spec(self, name, path, target=None):
        """Inject the fault at the first import of the library."""
        if name == self.name:
            self.inject()


def _prepare(moment: str, inject: Callable[[], None]) -> None:
    """Let `inject` be called whenever a moment comes."""
    from mlmoe_jax.runs import checkpoint
    from mlmoe_jax.runs.folder import RunFolder
    from mlmoe_jax.runtime import storage
    from mlmoe_jax.training import loop, step

    def around(owner: object, name: str, *, first: bool = False, then: Callable = lambda *_: None) -> None:
        real = getattr(owner, name)

        def wrapped(*arguments, **options):
            if first:
                inject()
            value = real(*arguments, **options)
            then(*arguments)
            if not first:
                inject()
            return value

        setattr(owner, name, wrapped)

    match moment:
        case "set-up":
            around(loop, "open_training_data", first=True)
        case "compile":
            around(step.TrainStep, "lower")
        case "step":
            around(step.TrainStep, "__call__", first=True)
        case "checkpoint-half":
            around(checkpoint, "save")
        case "checkpoint-done":
            around(checkpoint, "save", then=lambda manager, *_: manager.wait_until_finished())
        case "row":
            around(RunFolder, "append_row")
        case "evaluation":
            around(loop, "score", first=True)
        case "final-evaluation":
            around(loop, "finish", first=True)
        case "saving":
            around(storage.os, "replace", first=True)
        case "end":
            around(loop, "finish")
        case _:
            raise ValueError(moment)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], os.environ.get("FAULT", "")))
