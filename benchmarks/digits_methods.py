"""Compare methods on digits-v1: mAP over seeds, drop without correlations, parameters, training speed.

    python -m benchmarks.digits_methods --seeds=0,1,2 --out=runs/digits_methods

Each method and seed has its own run folder; finished runs are read, not trained again. Further flags override every
config, such as --config.train.epochs=4. Speed is measured by alternating training steps of the methods, so only ratios
are meaningful.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from mlmoe_jax.config import load_config
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.runs.assemble import assemble, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import shard_batch
from mlmoe_jax.training.setup import open_experiment, with_steps

METHODS = (
    "linear_probe:dataset=digits",
    "finetune:dataset=digits",
    "vpt:dataset=digits,variant=shallow",
    "vpt:dataset=digits",
    "gatevpt:dataset=digits",
    "e2vpt:dataset=digits",
    "gvpt:dataset=digits,sides=co",
    "gvpt:dataset=digits,sides=dc",
    "gvpt:dataset=digits",
    "mlvpt_digits",
)
SPLITS = ("val", "test", "test_shift")


def results_of(config: str, seed: int, out: Path, overrides: list[str]) -> dict:
    """Return the metrics of one method and seed; train it first if there are no results."""
    folder = out / f"{config.replace(':', '_')}-seed{seed}"
    if not (folder / "results.json").exists():
        command = [sys.executable, "-m", "mlmoe_jax.main", f"--config={config}", f"--workdir={folder}"]
        subprocess.run([*command, f"--config.seed={seed}", *overrides], check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "results.json").read_text())


def speeds(configs: list[str], pairs: list[tuple[str, str]], *, rounds: int = 5, steps: int = 5) -> list[tuple]:
    """Return (trainable parameters, training images per second) per config; median of `rounds` alternating rounds."""
    running = []
    for reference in configs:
        config = load_config(reference, pairs)
        experiment, mesh = open_experiment(config, RunFolder("unused")), setup_jax(config)
        parts = assemble(config, experiment.label_space)
        built = with_steps(experiment, parts, preprocess_for(config), mesh).steps
        size = config.train.batch_size
        loader = build_loader(config.data, experiment.train_split, batch_size=size, augment=config.augment)
        state = built.place(built.initial_state(parts))
        running.append([built.train_step, state, shard_batch(next(iter(loader)), mesh), size, []])
    for turn in range(rounds + 1):
        for method in running:
            train_step, state, batch, _, seconds = method
            started = time.perf_counter()
            for _ in range(steps):
                state, metrics = train_step(state, batch)
            jax.block_until_ready(metrics)
            method[1] = state
            if turn:  # the first compiles
                seconds.append((time.perf_counter() - started) / steps)
    return [
        (sum(v.size for v in state.trainable.values()), size / statistics.median(seconds))
        for _, state, _, size, seconds in running
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=METHODS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/digits_methods"))
    options, overrides = parser.parse_known_args()
    pairs = [tuple(flag.removeprefix("--config.").split("=", 1)) for flag in overrides]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = {config: [results_of(config, seed, options.out, overrides) for seed in seeds] for config in options.configs}
    measured = speeds(list(options.configs), pairs)
    print("mAP in percent, mean ± standard deviation over seeds; drop = test − test_shift\n")
    print("| config | trainable | val | test | test_shift | drop | training images/s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for (config, results), (trainable, speed) in zip(runs.items(), measured, strict=True):
        columns = {name: np.array([100 * r[name]["mAP"] for r in results]) for name in SPLITS}
        columns["drop"] = columns["test"] - columns["test_shift"]
        cells = " | ".join(f"{x.mean():.2f} ± {x.std():.2f}" for x in columns.values())
        print(f"| `{config}` | {trainable:,} | {cells} | {speed:.0f} |", flush=True)


if __name__ == "__main__":
    main()
