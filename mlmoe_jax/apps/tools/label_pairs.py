"""Pairs of labels by name: how often is b predicted, with and without a? (ML-VPT, figure 1, and ML-VPT, figure 7)

ML-VPT illustrates co-occurrence overfitting with images in which a label is predicted because another one that often
accompanies it is present. This module counts such predictions for named pairs (a, b), for one run or for two runs on
the same images, at the thresholds of each run. No pair is left out, however few images support it: each rate comes with
its number of images and an interval.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.cooccurrence import Pair, cell_masks, training_pairs
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.registry import suggestion

# The pairs (a, b) of COCO whose p(b | a) ML-VPT quotes: 0.62, 0.51, 0.45, 0.32 and 0.23.
PAPER_PAIRS = (
    ("traffic light", "car"),
    ("toilet", "sink"),
    ("stop sign", "car"),
    ("cow", "person"),
    ("frisbee", "dog"),
)
MOST_PAIRS = 5  # chosen from the training labels
CONFIDENCE = 0.95
# The rates of a pair: name -> the images among which b is predicted.
RATES = {
    "false_with_a": "images with a and without b",
    "false_without_a": "images without a and without b",
    "found_with_a": "images with a and with b",
    "found_without_a": "images without a and with b",
}


# ---------------------------------------------------------------------------------------------------------- the pairs
def parse_pairs(text: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Read pairs of labels such as `frisbee:dog,toilet:sink`; `a:b` asks how a affects the prediction of b.

    A pair whose names contain a comma is quoted as in CSV: `"plate, white:fork",frisbee:dog`. Repeated pairs count
    once. names: the labels of the run. Raises UserError for a pair that is not two different labels of the run.
    """
    known, found = set(names), []
    for item in next(csv.reader([text], skipinitialspace=True), []):
        cuts = [at for at, letter in enumerate(item) if letter == ":"]
        pairs = [(item[:at].strip(), item[at + 1 :].strip()) for at in cuts]
        fitting = [pair for pair in pairs if known.issuperset(pair)]
        if not pairs or (fitting and fitting[0][0] == fitting[0][1]):
            raise UserError(f"--pairs has '{item}', which is not a pair of two labels such as frisbee:dog")
        if not fitting:
            wrong = next(name for name in pairs[0] if name not in known)
            raise UserError(
                f"--pairs has '{item}', but '{wrong}' is none of the {len(names):,} labels{_nearest(wrong, names)}"
            )
        found.append(fitting[0])
    if not found:
        raise UserError("--pairs is empty; write pairs of labels such as frisbee:dog,toilet:sink")
    return list(dict.fromkeys(found))


def _nearest(name: str, names: Sequence[str]) -> str:
    return suggestion(name, names) if len(names) <= 20 or "did you mean" in suggestion(name, names) else ""


def choose_pairs(names: Sequence[str], space: LabelSpace | None, *, support: int) -> list[tuple[str, str]]:
    """Return the five pairs of the paper if all of their labels are among `names`, else those of the training labels.

    The latter are the MOST_PAIRS pairs with the largest p(b | a) above p(b), with both labels in at least `support`
    training images; none without a label space.
    """
    if set(names).issuperset(name for pair in PAPER_PAIRS for name in pair):
        return list(PAPER_PAIRS)
    if space is None or not space.images:
        return []
    above_zero = 1 / space.images
    found = training_pairs(space.together, space.positives, space.images, level=above_zero, support=support)
    return [(space.names[pair.a], space.names[pair.b]) for pair in found[:MOST_PAIRS]]


def pair_in_training(names: tuple[str, str], labels: Sequence[str], space: LabelSpace | None) -> Pair:
    """Return a pair as columns of `labels`, with its statistics in training: nan and 0 without a label space."""
    a, b = (labels.index(name) for name in names)
    if space is None:
        return Pair(a, b, math.nan, math.nan, 0)
    of_a, of_b = (space.names.index(name) for name in names)
    both, positives = int(space.together[of_a, of_b]), int(space.positives[of_a])
    return Pair(a, b, both / positives if positives else math.nan, float(space.frequency[of_b]), both)


# -------------------------------------------------------------------------------------------------------- thresholds
class Cuts(NamedTuple):
    """The thresholds f64[K] of a run, and where they come from, as the end of a sentence."""

    values: np.ndarray
    origin: str


def prediction_cuts(found: Thresholds | None, default: float, split: str, labels: Sequence[str]) -> Cuts:
    """Return the thresholds with which the run predicts `labels`, those of thresholds.json.

    found: None if the file is missing. `default` replaces thresholds that were fitted on this very split, whose rates
    would be too optimistic. Raises UserError if a label has no threshold.
    """
    same = Cuts(np.full(len(labels), default), f"{default:g} for every label")
    if found is None:
        return same
    if found.source:
        fitted = found.cuts_for(split, labels)
        if not fitted:
            return Cuts(same.values, f"{same.origin}, as those of thresholds.json were fitted on {split} itself")
        return Cuts(fitted["fitted"], f"those of thresholds.json, fitted on {found.source['split']}")
    values = found.of(labels)
    if len(set(values.tolist())) == 1:
        return Cuts(values, f"{values[0]:g} for every label")
    return Cuts(values, f"those of thresholds.json, from {values.min():g} to {values.max():g}")


# ------------------------------------------------------------------------------------------------------------- rates
@dataclass(frozen=True)
class Rate:
    """The number of images, and of those among them for which b is predicted."""

    images: int
    predicted: int

    @property
    def share(self) -> float:
        """The share of images for which b is predicted; nan without images."""
        return self.predicted / self.images if self.images else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share; nan without images."""
        if not self.images:
            return math.nan, math.nan
        from scipy import stats  # imported here because it takes half a second

        found = stats.binomtest(self.predicted, self.images).proportion_ci(CONFIDENCE, method="wilson")
        return float(found.low), float(found.high)


def paired_interval(lost: int, gained: int, images: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares of the same images, (gained − lost)/images.

    lost, gained: images for which only the first, or only the second run predicts b. The interval is the adjusted Wald
    interval of Bonett and Price (Journal of Educational and Behavioral Statistics 37, 2012), which stays wide for few
    images, also if the runs agree. nan without images.
    """
    if not images:
        return math.nan, math.nan
    first, second = (lost + 1) / (images + 2), (gained + 1) / (images + 2)
    difference = second - first
    from scipy import stats

    reach = stats.norm.ppf((1 + CONFIDENCE) / 2) * math.sqrt((first + second - difference**2) / (images + 2))
    return max(-1.0, difference - reach), min(1.0, difference + reach)


def pair_rates(scores: np.ndarray, label: np.ndarray, mask: np.ndarray, pair: Pair, cuts: Cuts) -> dict[str, Rate]:
    """Return RATES of a pair for one run; scores, label, mask: [N,K], all scores defined."""
    predicted = scores[:, pair.b] >= cuts.values[pair.b]
    cells = rate_cells(label, mask, pair)
    return {name: Rate(int(cell.sum()), int((cell & predicted).sum())) for name, cell in cells.items()}


def rate_cells(label: np.ndarray, mask: np.ndarray, pair: Pair) -> dict[str, np.ndarray]:
    """Return the images bool[N] of each of RATES; label, mask: [N,K]."""
    cells = cell_masks(pair, np.asarray(label) == 1, np.asarray(mask) != 0)
    return dict(zip(RATES, (cells.a_only, cells.neither, cells.both, cells.b_only), strict=True))


@dataclass(frozen=True)
class DifferingImage:
    """An image with a for which only one of two runs predicts b.

    present: whether it has b. first, second: the scores of b. gained: whether the second run is the one predicting b.
    others: the number of other labels whose predictions differ; 0: the runs differ in this pair only.
    """

    id: str
    present: bool
    first: float
    second: float
    gained: bool
    others: int

    @property
    def better(self) -> bool:
        """Whether the second run is right."""
        return self.present == self.gained


def differing_images(
    one: SplitScores, other: SplitScores, label: np.ndarray, mask: np.ndarray, pair: Pair, cuts: tuple[Cuts, Cuts]
) -> list[DifferingImage]:
    """Return the images with a for which exactly one of two runs predicts b, among those with both labels known.

    one, other: the same N images, all with scores. First come the images on which the runs agree about all labels
    other than a and b, then those with fewer other differences; of equal ones, the larger change of the score first.
    """
    known = np.asarray(mask) != 0
    first, second = (table.scores >= cut.values for table, cut in zip((one, other), cuts, strict=True))
    differs = (first != second) & known
    cells = rate_cells(label, mask, pair)
    rows = np.flatnonzero((cells["false_with_a"] | cells["found_with_a"]) & differs[:, pair.b])
    others = differs[rows].sum(axis=1) - differs[rows, pair.b] - differs[rows, pair.a]
    change = np.abs(other.scores[rows, pair.b] - one.scores[rows, pair.b])
    return [
        DifferingImage(
            str(one.ids[row]),
            bool(label[row, pair.b] == 1),
            float(one.scores[row, pair.b]),
            float(other.scores[row, pair.b]),
            bool(second[row, pair.b]),
            int(count),
        )
        for row, count in ((rows[at], others[at]) for at in np.lexsort((-change, others)))
    ]
