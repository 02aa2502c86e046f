"""Co-occurrence overfitting: does a model report b because it sees a, and miss b where a is not?

Pairs (a, b) are chosen from the *training* labels alone, where a nearly always brings b, so that they are the same for
every model and split. The test images fall into four cells, a and b each there or not, and two questions are asked:

* Images without b: does a raise the score of b? The false-positive rate and the mean score of b where a is, against
  where a is not either. Conditioning on the absence of b takes the frequency of the pair out: a model that sees b as it
  is has a gap near 0 on any split. (A small gap may be honest: scenes with a may also look more like b.)
* Images with b: is b found without a? AP of b over its co-occurring positives (with a) and over its exclusive ones
  (without a), each against all negatives of b. These are the "co-occur" and "exclusive" distributions of Singh et al.,
  "Don't Judge an Object by Its Context" (CVPR 2020), who choose pairs by the scores of a model (their bias is the ratio
  of the mean scores of b with a and without). AP grows with the number of positives: each of the two compares between
  models, not with the other. AUC does not depend on it, so its gap does compare.

Relatives: out-of-context objects (Choi, Torralba & Willsky 2012), bias amplification (Zhao et al. 2017), which counts
predicted pairs and so mixes the two questions.

Shape letters: N images, K labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from mlmoe_jax.evaluation.metrics.groups import MetricGroup
from mlmoe_jax.evaluation.metrics.ranking import Bools, Floats, checked, rank


@dataclass(frozen=True)
class Pair:
    """Labels a, b and how they come together in training: p(b | a), p(b), and the images that show both."""

    a: int
    b: int
    p_b_given_a: float
    p_b: float
    support: int


@dataclass(frozen=True)
class Cells:
    """The number of images of each cell of a pair, among those with both labels known."""

    both: int
    a_only: int
    b_only: int
    neither: int


@dataclass(frozen=True)
class WithoutB:
    """Images without b: the share that is predicted b (fpr), and the mean score of b, with a and without."""

    fpr_with_a: float
    fpr_without_a: float
    score_with_a: float
    score_without_a: float

    @property
    def fpr_gap(self) -> float:
        """How much a raises the false-positive rate of b."""
        return self.fpr_with_a - self.fpr_without_a

    @property
    def score_gap(self) -> float:
        """How much a raises the mean score of an absent b."""
        return self.score_with_a - self.score_without_a


@dataclass(frozen=True)
class WithB:
    """AP and AUC of b over its positives with a (cooccurring) or without (exclusive), against all its negatives."""

    ap_cooccurring: float
    ap_exclusive: float
    auc_cooccurring: float
    auc_exclusive: float

    @property
    def auc_gap(self) -> float:
        """How much worse b is found without a."""
        return self.auc_cooccurring - self.auc_exclusive


@dataclass(frozen=True)
class PairBias:
    """What a model does with one pair on one split; a figure is nan if one of its cells has too few images."""

    pair: Pair
    images: Cells
    without_b: WithoutB
    with_b: WithB

    def row(self) -> dict[str, float]:
        """Return all of it by name, as cooccurrence.csv has it."""
        images = {f"images_{cell}": count for cell, count in vars(self.images).items()}
        return {**vars(self.pair), **images, **vars(self.without_b), **vars(self.with_b)}


# The figures of the two questions; those of one question are averaged over the same pairs.
_QUESTIONS = (
    (
        "pairs_fpr",
        "without_b",
        ("fpr_with_a", "fpr_without_a", "fpr_gap", "score_with_a", "score_without_a", "score_gap"),
    ),
    ("pairs_ap", "with_b", ("ap_cooccurring", "ap_exclusive", "auc_cooccurring", "auc_exclusive", "auc_gap")),
)
MEANINGS = {
    r"mAP_fall_from_test": "mAP on test minus that on this split, where labels no longer come together as in training",
    r"cooccurrence/fpr_with_a": "false-positive rate of b in images with a, which often brings b in training",
    r"cooccurrence/fpr_without_a": "the same in images without a",
    r"cooccurrence/fpr_gap": "how much a raises the false-positive rate of b",
    r"cooccurrence/score_with_a": "mean score of an absent b in images with a",
    r"cooccurrence/score_without_a": "the same in images without a",
    r"cooccurrence/score_gap": "how much a raises the score of an absent b",
    r"cooccurrence/ap_cooccurring": "average precision of b over its positives with a",
    r"cooccurrence/ap_exclusive": "the same over its positives without a",
    r"cooccurrence/auc_cooccurring": "chance that b with a scores higher than images without b",
    r"cooccurrence/auc_exclusive": "the same of b without a",
    r"cooccurrence/auc_gap": "how much worse b is found without a",
}
COOCCURRENCE = MetricGroup("Overfitting to co-occurrence, means over pairs of labels", MEANINGS)


def training_pairs(
    together: csr_array | ArrayLike, positives: ArrayLike, images: int, *, level: float = 0.4, support: int = 20
) -> list[Pair]:
    """Choose the ordered pairs (a, b) with p(b | a) ≥ level > 0 and above p(b), the strongest first.

    Args:
      together: i64[K,K], sparse or not, training images with both labels. positives: i64[K]. images: how many there
        are. All as in `data.labels.LabelSpace`.
      level: 0.4 is where ML-GCN draws an edge of its label graph.
      support: training images that must show both, because a few images make any frequency.

    A label that most images show reaches any level with most others by chance (COCO's person); only pairs that come
    together more often than that count.
    """
    together, positives = csr_array(together).tocoo(), np.asarray(positives, np.int64)
    if together.shape != (positives.size, positives.size):
        raise ValueError(f"counts must be [K,K] and positives [K], not {together.shape} and {positives.shape}")
    if not 0 < level <= 1:
        raise ValueError(f"level must be above 0 and at most 1, not {level}")
    a, b = together.row, together.col
    given, alone = together.data / np.maximum(positives[a], 1), positives[b] / max(1, images)
    chosen = (a != b) & (given >= level) & (given > alone) & (together.data >= max(1, support))
    columns = (values[chosen].tolist() for values in (a, b, given, alone, together.data))
    pairs = [Pair(*row) for row in zip(*columns, strict=True)]
    return sorted(pairs, key=lambda pair: -pair.p_b_given_a)


def pair_biases(
    scores: ArrayLike,
    labels: ArrayLike,
    pairs: Sequence[Pair],
    thresholds: float | ArrayLike,
    *,
    mask: ArrayLike | None = None,
    fewest: int = 10,
) -> list[PairBias]:
    """Measure every pair on a split, in the order of `pairs`.

    Args:
      scores: f[N,K], probabilities.
      labels: [N,K], positive where 1.
      thresholds: a number or f[K]; b is predicted where its score ≥ its threshold.
      mask: [N,K] or None; an image counts for a pair only where both labels are known, a negative of b for the AP also
        where a is not.
      fewest: images that every cell behind a figure must have.

    Raises:
      ValueError: wrong shapes, or a NaN score in a valid entry.
    """
    scores, positive, valid = checked(scores, labels, mask)
    cuts = np.broadcast_to(np.asarray(thresholds, np.float64), scores.shape[1:])
    return [_measure(pair, scores, positive, valid, cuts[pair.b], fewest) for pair in pairs]


def summarize(splits: Mapping[str, Sequence[PairBias]]) -> dict[str, dict[str, float]]:
    """Average the pairs of one or several splits so that the splits can be set side by side.

    Every pair weighs the same, whatever its number of images, or the commonest label would be the whole result. A pair
    enters the means of a question (see the module) only where *every* split defines all figures of that question, so
    that all splits and both sides of a gap average the same pairs.

    Args:
      splits: name -> what `pair_biases` returned, for the same pairs.

    Returns:
      name -> pairs, how many there are; pairs_fpr, over how many of them the means of fpr_* and score_* are, and
      pairs_ap, those of ap_* and auc_*; the mean of each of these figures and of the gaps, nan over none.

    Raises:
      ValueError: the splits have other pairs.
    """
    asked = [[(row.pair.a, row.pair.b) for row in rows] for rows in splits.values()]
    if any(pairs != asked[0] for pairs in asked):
        raise ValueError("the splits must be measured on the same pairs")
    report = {name: {"pairs": len(rows)} for name, rows in splits.items()}
    for count, question, figures in _QUESTIONS:
        answers = [[getattr(row, question) for row in rows] for rows in splits.values()]
        values = np.array([[[getattr(answer, f) for f in figures] for answer in of_split] for of_split in answers])
        values = values.reshape(len(splits), -1, len(figures))
        values = values[:, ~np.isnan(values).any(axis=(0, 2))]
        for summary, x in zip(report.values(), values, strict=True):
            means = x.mean(axis=0) if len(x) else np.full(len(figures), np.nan)
            summary.update({count: len(x)} | dict(zip(figures, means.tolist(), strict=True)))
    return report


def _measure(pair: Pair, scores: Floats, positive: Bools, valid: Bools, cut: np.float64, fewest: int) -> PairBias:
    score, shows_a, shows_b = scores[:, pair.b], positive[:, pair.a], positive[:, pair.b]
    known = valid[:, pair.a] & valid[:, pair.b]
    both, a_only = known & shows_a & shows_b, known & shows_a & ~shows_b
    b_only, neither = known & ~shows_a & shows_b, known & ~shows_a & ~shows_b
    cells = Cells(*(int(cell.sum()) for cell in (both, a_only, b_only, neither)))
    fpr, mean = [], []
    for cell in (a_only, neither):
        of_cell = score[cell].astype(np.float64)
        enough = of_cell.size >= max(1, fewest)
        fpr.append(float((of_cell >= cut).mean()) if enough else np.nan)
        mean.append(float(of_cell.mean()) if enough else np.nan)
    absent, ap, auc = score[valid[:, pair.b] & ~shows_b], [], []
    for cell in (both, b_only):
        enough = min(np.count_nonzero(cell), absent.size) >= max(1, fewest)
        ranking = rank(score[cell], [absent]) if enough else None
        ap.append(ranking.average_precision() if ranking else np.nan)
        auc.append(ranking.roc_auc() if ranking else np.nan)
    return PairBias(pair, cells, WithoutB(*fpr, *mean), WithB(*ap, *auc))
