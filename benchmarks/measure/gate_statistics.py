"""Statistics of the gates of trained mixtures of experts on a split: entropy, and dependence on the image.

    python -m benchmarks.measure gate_statistics --runs RUN RUN … --split=test

One row per run and kind of gate: mean entropy in nats and its maximum, the mean largest weight, and the standard
deviation of a weight over images, averaged over labels and experts (0 if the gates do not depend on the image).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import heading, left, row
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.models.apply import make_eval_step
from mlmoe_jax.models.experts import gate_entropy
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import Run, open_run
from mlmoe_jax.runtime.batches import run_batches


def gate_weights(run: Run, split: Split) -> dict[str, np.ndarray]:
    """Return the weights of each kind of gate over the readable images of a split, f64[N,K,E] (static: f64[1,K,E])."""
    step = make_eval_step(run.definition, run.preprocess, run.mesh, run.label_axes, gates=True)
    loader = build_loader(run.config.data, split, batch_size=run.config.eval.batch_size * run.mesh.size, labels=False)
    parts: dict[str, list[np.ndarray]] = {}
    for output in run_batches(
        lambda batch: step(run.values, run.frozen, batch), loader, run.mesh, advice="lower eval.batch_size"
    ):
        for name, weights in output["gates"].items():
            if len(weights) == len(output["mask"]):
                parts.setdefault(name, []).append(weights[output["mask"] > 0])
            else:
                parts[name] = [weights]
    return {name: np.concatenate(weights).astype(np.float64) for name, weights in parts.items()}


@dataclass(frozen=True)
class Options:
    runs: tuple[Path, ...]
    split: str = "test"


def measure(options: Options) -> Iterator[str]:
    columns = ("experts", "entropy", "maximum", "largest weight", "std over images")
    yield heading("run", left("gate"), *columns)
    for folder in options.runs:
        run = open_run(RunFolder(folder))
        split = open_split(run.config.data, options.split, classes=run.label_space.names, seed=run.config.seed)
        for kind, weights in gate_weights(run, split).items():
            experts, largest = weights.shape[-1], weights.max(axis=-1).mean()
            shown = [f"{number:.3f}" for number in (gate_entropy(weights).mean(), math.log(experts), largest)]
            yield row(folder.name, kind, experts, *shown, f"{weights.std(axis=0).mean():.4f}")
