"""The weight of gates on shared experts, per label.

DR-MoE says that its gates give shared experts more weight for correlated labels. `gates.npz` beside `scores.npz` holds
the weights: `ids` str[N], `split` str[N], `labels` i8[N,K] as in `scores.npz`, and `shared/GATE` f32[N,K], the summed
weight of the shared experts for each label (static gates: f32[1,K]), nan if an image could not be read.

Shape letters: N images, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.evaluation.metrics.multilabel import ratio
from mlmoe_jax.evaluation.results import PREFIXES, SplitScores
from mlmoe_jax.models.registries import head_class
from mlmoe_jax.runs.folder import GATES, SCORES, RunFolder
from mlmoe_jax.runtime.formats import PACKED, USUAL

Floats = NDArray[np.float64]
_SHARED = "shared/"


def shared_entries(config: ConfigDict) -> dict[str, tuple[int, ...]]:
    """Return gate -> indices of its shared experts, for each gate with shared and task experts."""
    shared = {}
    for gate, names in head_class(config).gate_entries(config).items():
        entries = tuple(e for e, name in enumerate(names) if name.startswith("shared "))
        if 0 < len(entries) < len(names):
            shared[gate] = entries
    return shared


def collect(outputs: Sequence[Mapping[str, Any]], images: int) -> dict[str, np.ndarray]:
    """Return gate -> f32[N,K] (static gates: f32[1,K]) from the outputs of the evaluation step for all batches.

    Rows of images that could not be read are nan.

    Args:
      outputs: outputs of `models.apply.make_eval_step`.
      images: N.
    """
    shares = {}
    for gate in outputs[0].get("shares", {}):
        parts = [output["shares"][gate] for output in outputs]
        if len(parts[0]) != len(outputs[0]["mask"]):  # static gates
            shares[gate] = np.asarray(parts[0], np.float32)
            continue
        shares[gate] = np.full((images, parts[0].shape[1]), np.nan, np.float32)
        for output, part in zip(outputs, parts, strict=True):
            real = output["mask"] > 0
            shares[gate][output["id"][real]] = part[real]
    return shares


def join(splits: Sequence[SplitScores]) -> dict[str, np.ndarray]:
    """Return the arrays `shared/GATE` of gates.npz for these splits, in their order; {} without shares."""
    joined = {}
    for gate in splits[0].shares:
        parts = [split.shares[gate] for split in splits]
        static = all(len(part) == 1 for part in parts)
        joined[f"{_SHARED}{gate}"] = parts[0] if static else np.concatenate(parts)
    return joined


class LabelShares(NamedTuple):
    """The mean weight on shared experts per label: over all images, and over the images with the label (else nan)."""

    mean: Floats
    present: Floats


def label_shares(folder: RunFolder, split: str, *, difficult: str) -> dict[str, LabelShares]:
    """Return gate -> LabelShares, from gates.npz of the training or else of --mode=eval; {} without the split.

    `difficult` is as in `data.label_codes.targets`. Raises UserError if the file is damaged.
    """
    for prefix in PREFIXES:
        name, scores = f"{prefix}{GATES}", folder / f"{prefix}{SCORES}"
        if not (folder / name).exists():
            continue
        # With static gates the file is mostly the codes of scores.npz, nearly all zeros, so it may unpack to their
        # size.
        usual = max(USUAL, PACKED * scores.stat().length if scores.exists() else 0)
        with folder.reading(name):
            stored = folder.read_npz(name, usual=usual)
            rows = stored["split"] == split
            label, mask = targets(stored["labels"][rows], difficult)
            gates = {key.removeprefix(_SHARED): array for key, array in stored.items() if key.startswith(_SHARED)}
            if rows.any():
                return {gate: _means(s if len(s) == 1 else s[rows], label * mask) for gate, s in gates.items()}
    return {}


def _means(shares: np.ndarray, positive: np.ndarray) -> LabelShares:
    shares = np.broadcast_to(np.asarray(shares, np.float64), positive.shape)
    read = ~np.isnan(shares).any(axis=1)
    shares, positive = shares[read], positive[read]
    if not len(shares):
        return LabelShares(*np.full((2, positive.shape[1]), np.nan))
    return LabelShares(shares.mean(axis=0), ratio((shares * positive).sum(axis=0), positive.sum(axis=0)))
