"""Co-occurrence overfitting: does a model predict b because a is present, and miss b if a is absent?

Pairs (a, b) are chosen from the *training* labels alone, such that b is frequent in images with a. So all models and
splits have the same pairs. The test images fall into four cells, a and b each present or absent, and there are two
questions:

* Images without b: does a raise the score of b? Compare the false-positive rate and the mean score of b in images with
  a and without a. Conditioning on the absence of b removes the frequency of the pair: a model that recognizes b itself
  has a gap near 0 on any split. (A small gap can be legitimate, because scenes with a may resemble scenes with b.)
* Images with b: is b recognized without a? Compare the AP of b over its co-occurring positives (with a) and over its
  exclusive positives (without a), each against all negatives of b. These are the "co-occur" and "exclusive"
  distributions of Singh et al., "Don't Judge an Object by Its Context" (CVPR 2020), who choose pairs by the scores of a
  model (their bias is the ratio of the mean scores of b with and without a). AP increases with the number of positives,
  so either AP can be compared between models, but the two APs cannot be compared. AUC does not depend on the number of
  positives, so its gap is meaningful.

Related work: out-of-context objects (Choi, Torralba & Willsky 2012), bias amplification (Zhao et al. 2017), which
counts predicted pairs and so mixes the two questions. Shape letters: N images, K labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from mlmoe_jax.evaluation.metrics.metric_groups import MetricGroup
from mlmoe_jax.evaluation.metrics.ranking import check_inputs, rank
from mlmoe_jax.runtime.array_types import Bools, Reals


@dataclass(frozen=True)
class Pair:
    """An ordered pair of labels (a, b), given by their indices, with its training statistics.

    `p_b_given_a` is the share of the training images with a that also have b, `p_b` the share of all training images
    that have b, and `support` the number of training images with both labels.
    """

    a: int
    b: int
    p_b_given_a: float
    p_b: float
    support: int


PairRow = dict[str, float]  # the values of a pair on a split by name, as in cooccurrence.csv; nan if undefined

PAIR_CELLS = ("both", "a_only", "b_only", "neither")
# The columns of cooccurrence.csv after the split.
PAIR_COLUMNS = (
    *("a", "b", "p_b_given_a", "p_b", "support"),
    *(f"images_{cell}" for cell in PAIR_CELLS),
    *("fpr_with_a", "fpr_without_a", "score_with_a", "score_without_a"),
    *("ap_cooccurring", "ap_exclusive", "auc_cooccurring", "auc_exclusive"),
)
# The metrics of the two questions. All metrics of a question are averaged over one set of pairs.
_QUESTIONS = (
    ("fpr_with_a", "fpr_without_a", "fpr_gap", "score_with_a", "score_without_a", "score_gap"),
    ("ap_cooccurring", "ap_exclusive", "auc_cooccurring", "auc_exclusive", "auc_gap"),
)
_GAPS = {
    "fpr_gap": ("fpr_with_a", "fpr_without_a"),
    "score_gap": ("score_with_a", "score_without_a"),
    "auc_gap": ("auc_cooccurring", "auc_exclusive"),
}
_MEANINGS = {
    r"cooccurrence/fpr_with_a": "false-positive rate of b in images with a, for pairs that often co-occur in training",
    r"cooccurrence/fpr_without_a": "false-positive rate of b in images without a",
    r"cooccurrence/fpr_gap": "how much a raises the false-positive rate of b",
    r"cooccurrence/score_with_a": "mean score of an absent b in images with a",
    r"cooccurrence/score_without_a": "mean score of an absent b in images without a",
    r"cooccurrence/score_gap": "how much a raises the score of an absent b",
    r"cooccurrence/ap_cooccurring": "average precision of b over its positives with a",
    r"cooccurrence/ap_exclusive": "average precision of b over its positives without a",
    r"cooccurrence/auc_cooccurring": "chance that b with a scores higher than images without b",
    r"cooccurrence/auc_exclusive": "chance that b without a scores higher than images without b",
    r"cooccurrence/auc_gap": "how much worse b is recognized without a",
}
COOCCURRENCE_METRICS = MetricGroup("Co-occurrence overfitting, means over pairs of labels", _MEANINGS)


def training_pairs(
    together: csr_array | ArrayLike, positives: ArrayLike, images: int, *, level: float = 0.4, support: int = 20
) -> list[Pair]:
    """Return the ordered pairs (a, b) of labels that often co-occur in training, by decreasing p(b | a).

    A pair is included if p(b | a) ≥ `level`, p(b | a) > p(b), and `support` or more training images have both labels.
    The condition p(b | a) > p(b) excludes pairs that co-occur by chance: a very frequent label (COCO's person) reaches
    any level with most labels.

    Args:
      together: i[K,K], sparse or dense: number of training images with both labels, as in `data.labels.LabelSpace`.
      positives: i[K], number of training images with each label.
      level: above 0; 0.4 is the threshold of an edge in ML-GCN's label graph.
      support: minimum, because frequencies of a few images are noise.
    """
    together, positives = csr_array(together).tocoo(), np.asarray(positives, np.int64)
    a, b = together.row, together.col
    conditional, alone = together.data / np.maximum(positives[a], 1), positives[b] / max(1, images)
    selected = (a != b) & (conditional >= level) & (conditional > alone) & (together.data >= max(1, support))
    columns = (values[selected].tolist() for values in (a, b, conditional, alone, together.data))
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
) -> list[PairRow]:
    """Return the co-occurrence metrics of each pair on one split, in the order of `pairs`, one dict per pair.

    The images form four cells: label a and label b are both present, a only, b only, or neither. The keys are:

    * `a`, `b`, `p_b_given_a`, `p_b`, `support`: the fields of `Pair`.
    * `images_both`, `images_a_only`, `images_b_only`, `images_neither`: the number of images in each cell.
    * `fpr_with_a`, `fpr_without_a`, `score_with_a`, `score_without_a`: the false-positive rate and the mean score of b
      in images without b, with and without a.
    * `ap_cooccurring`, `auc_cooccurring`, `ap_exclusive`, `auc_exclusive`: AP and AUC of b for its positives with a,
      and for those without a, against all negatives of b.

    A metric is nan if a cell that it uses has fewer than `fewest` images. Scores are probabilities f[N,K], and labels
    [N,K] are positive if equal to 1.

    Args:
      thresholds: a number or f[K]. Label b is predicted if its score ≥ its threshold.
      mask: [N,K], 0 for unknown labels; None: all labels are known. An image is in a cell only if a and b are known.
        The negatives for AP and AUC also include images in which a is unknown.
    """
    scores, positive, valid = check_inputs(scores, labels, mask)
    thresholds = np.broadcast_to(np.asarray(thresholds, np.float64), scores.shape[1:])
    rows: list[PairRow] = []
    for pair in pairs:
        score, shows_a, shows_b = scores[:, pair.b], positive[:, pair.a], positive[:, pair.b]
        known_b = valid[:, pair.b]
        known = valid[:, pair.a] & known_b
        cells = {
            "both": known & shows_a & shows_b,
            "a_only": known & shows_a & ~shows_b,
            "b_only": known & ~shows_a & shows_b,
            "neither": known & ~shows_a & ~shows_b,
        }
        images = {f"images_{name}": int(cell.sum()) for name, cell in cells.items()}
        values = _false_positives(score, cells, thresholds[pair.b], max(1, fewest))
        values |= _rankings(score, cells, score[known_b & ~shows_b], max(1, fewest))
        rows.append({**vars(pair), **images, **values})
    return rows


def _false_positives(score: Reals, cells: Mapping[str, Bools], threshold: np.float64, fewest: int) -> PairRow:
    """Return the false-positive rate and mean score of b with and without a; nan with fewer than `fewest` images."""
    rates, means = {}, {}
    for side, cell in (("with_a", cells["a_only"]), ("without_a", cells["neither"])):
        values = score[cell].astype(np.float64)
        enough = values.size >= fewest
        rates[f"fpr_{side}"] = float((values >= threshold).mean()) if enough else np.nan
        means[f"score_{side}"] = float(values.mean()) if enough else np.nan
    return rates | means


def _rankings(score: Reals, cells: Mapping[str, Bools], negatives: Reals, fewest: int) -> PairRow:
    """Return AP and AUC of b with and without a; nan with fewer than `fewest` positives or negatives."""
    precisions, areas = {}, {}
    for side, cell in (("cooccurring", cells["both"]), ("exclusive", cells["b_only"])):
        enough = min(np.count_nonzero(cell), negatives.size) >= fewest
        ranking = rank(score[cell], [negatives]) if enough else None
        precisions[f"ap_{side}"] = np.nan if ranking is None else ranking.average_precision()
        areas[f"auc_{side}"] = np.nan if ranking is None else ranking.roc_auc()
    return precisions | areas


def summarize(splits: Mapping[str, Sequence[PairRow]]) -> dict[str, dict[str, float]]:
    """Return the mean of each metric over pairs, comparable between splits, as split -> metric -> mean.

    Each metric belongs to one of two questions (see the module). The means of a question are over the pairs for which
    all metrics of the question are defined on *all* splits. So all splits, and both terms of a gap, average one set of
    pairs. Pairs have equal weights: with weights by number of images, the most frequent label would dominate.

    `splits` maps splits to results of `pair_biases` for equal pairs. The metrics are keys of `pair_biases`, and
    `fpr_gap`, `score_gap` and `auc_gap`. The metrics of a question are missing if no pair defines them.
    """
    report: dict[str, dict[str, float]] = {name: {} for name in splits}
    with_gaps = [
        [row | {gap: row[a] - row[b] for gap, (a, b) in _GAPS.items()} for row in rows] for rows in splits.values()
    ]
    for metrics in _QUESTIONS:
        values = np.array([[[row[name] for name in metrics] for row in rows] for rows in with_gaps])
        values = values[:, ~np.isnan(values).any(axis=(0, 2))]
        for summary, defined in zip(report.values(), values, strict=True):
            if len(defined):
                summary.update(zip(metrics, defined.mean(axis=0).tolist(), strict=True))
    return report
