"""Statistics of the gates of trained mixtures of experts on a split: entropy, and dependence on the image.

    python -m benchmarks.gate_statistics runs/digits_methods/mlvpt_digits-seed0 runs/digits_methods/... --split=test

One row per run and kind of gate: mean entropy in nats and its maximum, the mean largest weight, and the standard
deviation of a weight over images, averaged over labels and experts (0 if the gates do not depend on the image).
"""

import argparse
import math

from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.inference.gate_statistics import gate_statistics
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import open_run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    print("| run | gate | experts | entropy | maximum | largest weight | std over images |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for folder in options.runs:
        run = open_run(RunFolder(folder))
        split = open_split(run.config.data, options.split, classes=run.label_space.names, seed=run.config.seed)
        for kind, found in gate_statistics(run, split).items():
            experts = found.mean.shape[-1]
            print(
                f"| {folder.rstrip('/').rpartition('/')[2]} | {kind} | {experts} | {found.entropy.mean():.3f} | "
                f"{math.log(experts):.3f} | {found.largest.mean():.3f} | {found.deviation.mean():.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
