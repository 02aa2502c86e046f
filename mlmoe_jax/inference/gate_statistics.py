"""Statistics of the gates of a model over many images."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.explain import predictions
from mlmoe_jax.models.experts import gate_entropy
from mlmoe_jax.models.heads.catalog import head_of
from mlmoe_jax.runs.restore import Run


def shared_entries(config: ConfigDict) -> dict[str, tuple[int, ...]]:
    """Return the entries of shared experts in each gate that also has task experts, gate -> indices; {} without any."""
    found = {}
    for gate, names in head_of(config).gate_entries(config).items():
        entries = tuple(e for e, name in enumerate(names) if name.startswith("shared "))
        if 0 < len(entries) < len(names):
            found[gate] = entries
    return found


# ------------------------------------------------------------------------------------------------------------- a split
@dataclass(frozen=True)
class GateStatistics:
    """Statistics of one kind of gate over the images of a split.

    entropy: f64[K], mean entropy of the weights per label in nats, from 0 to log E. largest: f64[K], mean of the
    largest weight per label, from 1/E to 1. mean, deviation: f64[K,E], of each weight over the images; the deviation of
    static gates is 0.
    """

    entropy: np.ndarray
    largest: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


def gate_statistics(run: Run, split: Split) -> dict[str, GateStatistics]:
    """Return the statistics of each kind of gate over the readable images of a split; {} without gates.

    Raises UserError if no image can be read.
    """

    def gates() -> Iterator[dict[str, np.ndarray]]:
        for output in predictions(run, split, batch_size=run.config.eval.batch_size * run.mesh.size, attention=False):
            weights, mask = jax.device_get((output["prediction"].gates, output["mask"]))
            if (mask > 0).any():
                yield {name: w[mask > 0] if len(w) == len(mask) else w for name, w in weights.items()}

    statistics = summarize_gates(gates())
    if statistics is None:
        raise UserError(f"none of {len(split):,} images of {split.name} can be read")
    return statistics


def summarize_gates(batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, GateStatistics] | None:
    """Return the statistics of each kind of gate over batches {gate: f32[n,K,E]} of any n; None without batches."""
    first, sums, images, batch = {}, defaultdict(float), Counter(), None
    for batch in batches:
        for name, weights in batch.items():
            weights = np.asarray(weights, np.float64)
            # Sums of differences to the first image keep their precision even if a weight hardly changes.
            change = weights - first.setdefault(name, weights[0])
            images[name] += len(weights)
            sums[name, "entropy"] += np.asarray(gate_entropy(weights), np.float64).sum(axis=0)
            sums[name, "largest"] += weights.max(axis=-1).sum(axis=0)
            sums[name, "change"] += change.sum(axis=0)
            sums[name, "square"] += (change**2).sum(axis=0)
    if batch is None:
        return None
    found = {}
    for name, count in images.items():
        entropy, largest, change, square = (
            sums[name, what] / count for what in ("entropy", "largest", "change", "square")
        )
        deviation = np.sqrt(np.maximum(square - change**2, 0.0))
        found[name] = GateStatistics(entropy, largest, first[name] + change, deviation)
    return found
