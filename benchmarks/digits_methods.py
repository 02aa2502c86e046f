"""Compare methods on digits-v1: mean and spread of test and test_shift mAP over seeds, time, trainable parameters.

    python benchmarks/digits_methods.py --configs=mlvpt_digits,linear_probe --seeds=0,1,2 --out=runs/digits_methods

One run folder a method and seed; finished ones are only evaluated again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def run(config: str, seed: int, out: Path, overrides: list[str]) -> dict:
    """Train one method with one seed; return its results with the wall time in seconds."""
    folder = out / f"{config.replace(':', '_')}-seed{seed}"
    command = [sys.executable, "-m", "mlmoe_jax.main", f"--config={config}", f"--workdir={folder}"]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--json", f"--config.seed={seed}", *overrides], check=True, stdout=subprocess.PIPE, text=True
    )
    return {"seconds": time.perf_counter() - started, **json.loads(done.stdout)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="mlvpt_digits,linear_probe")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/digits_methods"))
    options, overrides = parser.parse_known_args()
    print("mAP in percent, mean ± standard deviation over seeds; fall = test − test_shift")
    print(f"{'method':<24}{'val':>14}{'test':>14}{'test_shift':>14}{'fall':>14}{'seconds':>9}")
    for config in options.configs.split(","):
        runs = [run(config, int(seed), options.out, overrides) for seed in options.seeds.split(",")]
        columns = {name: np.array([100 * r[name]["mAP"] for r in runs]) for name in ("val", "test", "test_shift")}
        columns["fall"] = columns["test"] - columns["test_shift"]
        cells = "".join(f"{f'{x.mean():.2f} ± {x.std():.2f}':>14}" for x in columns.values())
        print(f"{config:<24}{cells}{np.mean([r['seconds'] for r in runs]):>9.0f}", flush=True)


if __name__ == "__main__":
    main()
