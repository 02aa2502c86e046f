"""Train for many small steps with evaluations and saves, and measure whether memory, files or threads grow.

    python -m tools.faults.soak --json=soak.json
    python -m tools.faults.soak --steps=2000 --saves=20 --config.eval.every_epochs=500

The tiny program of `tools.faults.program` trains in its own process, which evaluates and saves --saves times.
Its resident memory, open descriptors and threads are read from outside halfway between two saves, when nothing is
written in the background. The slope is a least-squares fit over the last 70 % of the steps. Keys of the config can be
set as for a training.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from tools.faults.program import COMMAND, SCENES, use_environment

BATCH = 20
WARM_UP = 0.3  # the first part of the steps, which is not in the slope
MB = 2**20


class Sample(NamedTuple):
    """The process after a step."""

    step: int
    megabytes: float
    descriptors: int
    threads: int


def soak(place: Path, steps: int, saves: int, overrides: Sequence[str]) -> Iterator[Sample]:
    """Train in a folder and yield a sample between any two saves. Raises RuntimeError if the training fails."""
    use_environment(place)
    per_epoch = SCENES["train"] // BATCH
    often = f"{steps / saves / per_epoch:g}"
    flags = _pairs(COMMAND) | {
        "workdir": place / "run",
        "config.train.epochs": math.ceil(steps / per_epoch),
        "config.train.log_every": max(1, steps // saves // 2),
        "config.train.patience": 0,
        "config.eval.every_epochs": math.ceil(float(often)),
        "config.checkpoint.every_epochs": often,
        "config.log.tensorboard": False,
    }
    arguments = [f"--{name}={value}" for name, value in (flags | _pairs(overrides)).items()]
    with (place / "output.txt").open("wb") as output:
        command = [sys.executable, "-m", "tools.faults.program", *arguments]
        process = subprocess.Popen(command, env=os.environ | {"FAULT": ""}, stdout=output, stderr=output)
        for sample in _samples(psutil.Process(process.pid), process, place / "run" / "metrics.jsonl"):
            if sample.step % (steps // saves):
                yield sample
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {(place / 'output.txt').read_text()[-2000:]}")


def _pairs(flags: Sequence[str]) -> dict[str, str]:
    return dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def _samples(watched: psutil.Process, process: subprocess.Popen, log: Path) -> Iterator[Sample]:
    count = 0
    while process.poll() is None:
        time.sleep(0.05)
        rows = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        if len(rows) > count:
            count = len(rows)
            step = json.loads(rows[-1])["step"]
            try:
                with watched.oneshot():
                    yield Sample(step, watched.memory_info().rss / MB, watched.num_fds(), watched.num_threads())
            except psutil.Error:  # it has ended
                return


def summary(samples: list[Sample]) -> dict[str, float]:
    """Return the slopes after the warm-up, per 1,000 steps, and the numbers at both ends."""
    steady = np.array([sample for sample in samples if sample.step > WARM_UP * samples[-1].step])
    steps = steady[:, 0] / 1000
    result = {"steps": samples[-1].step, "samples": len(steady)}
    for column, name in enumerate(Sample._fields[1:], start=1):
        result[f"{name} per 1,000 steps"] = round(float(np.polyfit(steps, steady[:, column], 1)[0]), 3)
        edge = max(1, len(steady) // 20)
        for when, part in (("first", steady[:edge]), ("last", steady[-edge:])):
            result[f"{name}, {when}"] = round(float(part[:, column].mean()), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--saves", type=int, default=200, help="how often the state is evaluated and saved")
    parser.add_argument("--json", type=Path, help="write the samples and the summary to this file")
    flags, overrides = parser.parse_known_args()
    if wrong := [flag for flag in overrides if not (flag.startswith("--config.") and "=" in flag)]:
        parser.error(f"{wrong[0]} is neither a flag nor --config.KEY=VALUE")
    with tempfile.TemporaryDirectory() as place:
        samples = []
        for sample in soak(Path(place), flags.steps, flags.saves, overrides):
            samples.append(sample)
            print(*(f"{name} {value:.0f}" for name, value in sample._asdict().items()), sep=", ", flush=True)
    slopes = summary(samples)
    print(json.dumps(slopes, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps({"summary": slopes, "samples": samples}))


if __name__ == "__main__":
    main()
