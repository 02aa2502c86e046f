"""Train with a step that computes nothing on a batch that is there, and print the seconds per step of the loop.

    python benchmarks/peers/idle_loop.py --workdir=FOLDER --steps=1000 --wait=0.01

What remains is the host's work per step: placing the batch, hooks, logs, and the agreement of the processes. The suite
`overhead` starts it, once per process of a job.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

ROWS_LEFT_OUT = 2  # at the start, where programs are compiled
SCENE = (64, 64, 3)


def train(workdir: str, steps: int, wait: float) -> int:
    """Train, and print the median of the seconds per step between two logged rows, as JSON, on the first process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mlmoe_jax as mm
    from mlmoe_jax.data.sources import digits
    from mlmoe_jax.runs.folder import RunFolder
    from mlmoe_jax.runtime import distributed
    from mlmoe_jax.training import build_steps, experiment
    from mlmoe_jax.training.step import TrainStep

    def pause():
        time.sleep(wait)
        return np.float32(1)

    def nothing(moving, frozen, batch):
        one = jax.pure_callback(pause, jax.ShapeDtypeStruct((), jnp.float32)) if wait else jnp.float32(1)
        return moving.replace(step=moving.step + 1), {"loss": one, "gradient_norm": one}

    def idle_step(config, placed, *_):
        return TrainStep(nothing, placed.mesh, placed.label_axes)

    def same_batch(*arguments, read=experiment.training_batches, **options):
        return itertools.repeat(next(iter(read(*arguments, **options))))

    times: list[tuple[int, float]] = []

    def noticed(folder, row, append=RunFolder.append_row):
        append(folder, row)
        times.append((row["step"], time.perf_counter()))

    def blank(split, labels):
        return np.broadcast_to(np.uint8(0), (len(labels), *SCENE))

    config = mm.load_config("linear_probe:dataset=digits", [])
    size = config.train.batch_size
    config.train.epochs = config.eval.every_epochs = config.checkpoint.every_epochs = 1
    config.data.test_splits = ()
    scenes = {"train": steps * size, "val": size}
    with (
        mock.patch.object(digits, "SCENES", scenes),
        mock.patch.object(digits, "_cached", lambda name, render: render()),
        mock.patch.object(digits, "_render_scenes", blank),
        mock.patch.object(build_steps, "make_train_step", idle_step),
        mock.patch.object(experiment, "training_batches", same_batch),
        mock.patch.object(RunFolder, "append_row", noticed),
    ):
        mm.train(config, workdir)
    if distributed.is_first():
        rows = itertools.pairwise(times[ROWS_LEFT_OUT:-1])  # the last row follows an evaluation
        seconds = [(after - before) / (last - first) for (first, before), (last, after) in rows]
        print(json.dumps({"seconds": statistics.median(seconds), "devices": jax.device_count()}))
    return 0


if __name__ == "__main__":
    from mlmoe_jax.apps.cli.process import run_job

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that the device takes for a step")
    options = parser.parse_args()
    sys.exit(run_job(lambda: train(options.workdir, options.steps, options.wait), together=True))
