"""The weight of gates on shared experts: does it follow the correlations of labels, as DR-MoE claims?

DR-MoE says that its gates give shared experts more weight for correlated labels, and task experts more for
heterogeneous ones. Both sides are measured here, and compared by rank correlation: per label, the share of gate weight
on shared experts against the co-occurrence of the label in training; per image, the share against its number of labels.

`gates.npz` beside `scores.npz` has the shares of all images: `ids` str[N], `split` str[N], `labels` i8[N,K] as in
`scores.npz`, and `shared/GATE` f32[N,K], the summed weight of the shared experts for each label (static gates:
f32[1,K]), nan if an image could not be read.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.data.batch import targets
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import PREFIXES, SplitScores
from mlmoe_jax.runs.folder import GATES, SCORES, RunFolder
from mlmoe_jax.runtime.npz import PACKED, USUAL

Floats = NDArray[np.float64]
_SHARED = "shared/"
_CONFIDENCE = 0.95
_FEWEST = 4  # pairs of values for an interval of a rank correlation


# --------------------------------------------------------------------------------------------------------- the file
def collect(outputs: Sequence[Mapping[str, Any]], images: int) -> dict[str, np.ndarray]:
    """Return gate -> f32[N,K] (static gates: f32[1,K]) from the outputs of the evaluation step for all batches.

    outputs: each with `id`, `mask` and perhaps `shares`, see `inference.step.make_eval_step`. images: N. The rows of
    images that could not be read are nan.
    """
    found = {}
    for gate in outputs[0].get("shares", {}):
        parts = [output["shares"][gate] for output in outputs]
        if len(parts[0]) != len(outputs[0]["mask"]):  # static gates
            found[gate] = np.asarray(parts[0], np.float32)
            continue
        found[gate] = np.full((images, parts[0].shape[1]), np.nan, np.float32)
        for output, part in zip(outputs, parts, strict=True):
            real = output["mask"] > 0
            found[gate][output["id"][real]] = part[real]
    return found


def join(splits: Sequence[SplitScores]) -> dict[str, np.ndarray]:
    """Return the arrays `shared/GATE` of gates.npz for these splits, in their order; {} without shares."""
    found = {}
    for gate in splits[0].shares:
        parts = [split.shares[gate] for split in splits]
        static = all(len(part) == 1 for part in parts)
        found[f"{_SHARED}{gate}"] = parts[0] if static else np.concatenate(parts)
    return found


@dataclass(frozen=True)
class SplitShares:
    """The shares of one split, from a run folder.

    codes: i8[N,K] of data.split. shares: gate -> f64[N,K], nan if an image could not be read (static gates: f64[1,K]).
    """

    name: str
    codes: np.ndarray
    shares: dict[str, Floats]


def read_shares(folder: RunFolder) -> dict[str, SplitShares]:
    """Read gates.npz of the training and of --mode=eval; those of the training take precedence. {} without the file.

    Raises UserError if a file is damaged.
    """
    found: dict[str, SplitShares] = {}
    for prefix in PREFIXES:
        if (folder / f"{prefix}{GATES}").exists():
            for split, shares in _read_file(folder, prefix).items():
                found.setdefault(split, shares)
    return found


def _read_file(folder: RunFolder, prefix: str) -> dict[str, SplitShares]:
    name, scores = f"{prefix}{GATES}", folder / f"{prefix}{SCORES}"
    # With static gates the file is little more than the codes of scores.npz, mostly zeros: it may unpack to as much.
    usual = max(USUAL, PACKED * scores.stat().length if scores.exists() else 0)
    with folder.reading(name):
        stored = folder.read_npz(name, usual=usual)
        of, codes = stored["split"], stored["labels"]
        gates = {key.removeprefix(_SHARED): array for key, array in stored.items() if key.startswith(_SHARED)}
    fits = codes.ndim == 2 and of.shape == codes.shape[:1]
    for shares in gates.values():
        of_images = shares.ndim == 2 and len(shares) in (1, len(codes))
        fits = fits and of_images and shares.shape[1:] == codes.shape[1:] and np.issubdtype(shares.dtype, np.floating)
    if not fits:
        raise UserError(f"{folder / name} is damaged: its shares do not fit its images and labels")
    return {
        split: SplitShares(
            split,
            codes[of == split],
            {gate: np.asarray(s if len(s) == 1 else s[of == split], np.float64) for gate, s in gates.items()},
        )
        for split in dict.fromkeys(of.tolist())
    }


# -------------------------------------------------------------------------------------------------------- the shares
@dataclass(frozen=True)
class ImageShares:
    """The shares of n readable images: f64[n] mean over all labels, f64[n] mean over their own, i64[n] number of these.

    own is nan for an image without labels.
    """

    all: Floats
    own: Floats
    labels: np.ndarray


@dataclass(frozen=True)
class GateShares:
    """The shares of one gate on one split.

    mean: f64[K], over all readable images. present: f64[K], over the images with the label; nan without such images.
    with_label: i64[K], the number of these. images: None for static gates, whose weights are the same for every image.
    """

    gate: str
    mean: Floats
    present: Floats
    with_label: np.ndarray
    images: ImageShares | None


def measure_shares(split: SplitShares, *, difficult: str) -> list[GateShares]:
    """Return the shares of each gate of a split per label and per image; difficult: as in `data.batch.targets`."""
    label, mask = targets(split.codes, difficult)
    positive = (label == 1) & (mask != 0)
    return [_of_gate(gate, shares, positive) for gate, shares in split.shares.items()]


def _of_gate(gate: str, shares: Floats, positive: np.ndarray) -> GateShares:
    read = ~np.isnan(shares).any(axis=1)
    static = len(shares) == 1 or (read.sum() > 1 and not np.ptp(shares[read], axis=0).any())
    if len(shares) > 1:
        shares, positive = shares[read], positive[read]
    counts, own = positive.sum(axis=0), positive.sum(axis=1)
    if not len(shares):
        nothing = np.full(positive.shape[1], np.nan)
        return GateShares(gate, nothing, nothing, counts, None)
    sums = np.where(positive, shares, 0.0)
    present = np.where(counts > 0, sums.sum(axis=0) / np.maximum(counts, 1), np.nan)
    of_images = None
    if not static:
        of_own = np.where(own > 0, sums.sum(axis=1) / np.maximum(own, 1), np.nan)
        of_images = ImageShares(shares.mean(axis=1), of_own, own)
    return GateShares(gate, shares.mean(axis=0), present, counts, of_images)


@dataclass(frozen=True)
class LabelCompany:
    """The co-occurrence of each label in training: f64[K] mean and largest p(other | label) over the other labels.

    nan for a label without training images, and if there is only one label.
    """

    mean: Floats
    largest: Floats


def label_company(space: LabelSpace) -> LabelCompany:
    """Return the co-occurrence of each label with the others; p(b | a) = images with both / images with a."""
    others, positives = len(space.names) - 1, np.asarray(space.positives, np.float64)
    defined = (positives > 0) & (others > 0)
    scale = np.where(defined, 1 / np.maximum(positives, 1), np.nan)
    sums, largest = space.together.sum(axis=1), space.together.max(axis=1)
    largest = largest.toarray() if hasattr(largest, "toarray") else np.asarray(largest)
    return LabelCompany(np.asarray(sums).ravel() * scale / max(1, others), largest.ravel() * scale)


# -------------------------------------------------------------------------------------------------------- the claims
@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ of `count` pairs of values, its 95 % interval, and the p-value of ρ = 0; nan if undefined."""

    rho: float
    low: float
    high: float
    p: float
    count: int


def rank_correlation(x: ArrayLike, y: ArrayLike) -> RankCorrelation:
    """Return Spearman's rank correlation of f[n] and f[n]; pairs with a nan are left out.

    Equal values share their mean rank. p: two-sided, from Student's t. The interval is that of Bonett and Wright
    (Psychometrika 65, 2000), tanh(artanh ρ ± z·√((1 + ρ²/2)/(n − 3))); it is undefined for n < 4 and |ρ| = 1. All are
    undefined if a side is constant.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    defined = ~(np.isnan(x) | np.isnan(y))
    x, y, count = x[defined], y[defined], int(defined.sum())
    if count < 3 or not np.ptp(x) or not np.ptp(y):
        return RankCorrelation(math.nan, math.nan, math.nan, math.nan, count)
    from scipy import stats  # imported here because it takes half a second

    found = stats.spearmanr(x, y)
    rho, low, high = float(found.statistic), math.nan, math.nan
    if count >= _FEWEST and 1 - abs(rho) > 1e-12:
        reach = stats.norm.ppf((1 + _CONFIDENCE) / 2) * math.sqrt((1 + rho**2 / 2) / (count - 3))
        low, high = (math.tanh(math.atanh(rho) + side * reach) for side in (-1, 1))
    return RankCorrelation(rho, low, high, float(found.pvalue), count)


@dataclass(frozen=True)
class Claim:
    """One side of DR-MoE's claim: the rank correlation of a share with a measure, over labels or over images."""

    over: str
    share: str
    against: str
    correlation: RankCorrelation


def claimed_correlations(shares: GateShares, company: LabelCompany) -> list[Claim]:
    """Return the correlations that the claim predicts to be positive; those over images only for dynamic gates."""
    found = [
        Claim("labels", share, against, rank_correlation(values, measure))
        for share, values in (
            ("label, all images", shares.mean),
            ("label, images with it", shares.present),
        )
        for against, measure in (("mean p(other | label)", company.mean), ("max p(other | label)", company.largest))
    ]
    if shares.images is not None:
        one = shares.images
        for share, values in (("image, all labels", one.all), ("image, its own labels", one.own)):
            found.append(Claim("images", share, "number of labels", rank_correlation(values, one.labels)))
    return found
