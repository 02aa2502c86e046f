"""What the gates of trained mixtures of experts do on a split: their entropy, and whether they look at the image.

    python -m benchmarks.gate_statistics runs/digits_methods/mlvpt_digits-seed0 runs/digits_methods/... --split=test

A row a run and kind of gate: mean entropy in nats beside its largest possible value, the mean largest weight, and the
standard deviation of a weight over images, averaged over labels and experts (0 where gates do not depend on the image).
"""

import argparse
import math

import jax
import numpy as np

from mlmoe_jax.assemble import open_run
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.sources import open_split
from mlmoe_jax.losses import gate_entropy
from mlmoe_jax.runfolder import RunFolder
from mlmoe_jax.sharding import on_device
from mlmoe_jax.steps import prepare


def gates_of(folder: str, name: str) -> dict[str, np.ndarray]:
    """Return the routing weights f32[N,K,E] of each kind of gate over a split; static gates f32[1,K,E]."""
    run = open_run(RunFolder(folder))
    split = open_split(run.config.data, name, classes=run.label_space.names, seed=run.config.seed)

    @jax.jit
    def step(values, frozen, batch):
        return run.definition.merge({**values, **frozen})(prepare(batch, run.preprocess)).gates

    found: dict[str, list[np.ndarray]] = {}
    for batch in on_device(build_loader(run.config.data, split, batch_size=run.config.eval.batch_size), run.mesh):
        for kind, gates in jax.device_get(step(run.values, run.frozen, batch)).items():
            real = np.asarray(batch["mask"]) > 0
            found.setdefault(kind, []).append(gates if len(gates) == 1 else gates[real])
    return {kind: parts[0] if len(parts[0]) == 1 else np.concatenate(parts) for kind, parts in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    print("| run | gate | experts | entropy | at most | largest weight | std over images |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for folder in options.runs:
        for kind, gates in gates_of(folder, options.split).items():
            entropy, experts = float(np.mean(gate_entropy(gates))), gates.shape[-1]
            print(
                f"| {folder.rstrip('/').rpartition('/')[2]} | {kind} | {experts} | {entropy:.3f} | "
                f"{math.log(experts):.3f} | {gates.max(axis=-1).mean():.3f} | {gates.std(axis=0).mean():.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
