"""Label groups from the co-occurrence of the training labels, as in ML-VPT and CPSD (BoostMLC).

Shape letters: N images, K labels.
"""

import warnings

import numpy as np
from jaxtyping import Float, Int32, Int64, Shaped
from scipy.sparse import csr_array

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.label_matrix import LabelMatrix
from mlmoe_jax.data.labels.graph import Counts, Positives, conditional_probabilities
from mlmoe_jax.errors import UserError

_RESTARTS = 4
_ROWS = 1 << 16


def cooccurrence(labels: LabelMatrix | Shaped[np.ndarray, "n k"]) -> tuple[csr_array, Int64[np.ndarray, " k"]]:
    """Count the images with each pair of labels and with each label. Only the code 1 (POSITIVE) is counted.

    The counts of pairs are sparse i64[K,K] with a zero diagonal, since few pairs of 20,000 labels occur. The counts of
    labels are i64[K].
    """
    present = LabelMatrix.of(labels).marked(POSITIVE)
    counts = csr_array((present.shape[1], present.shape[1]), dtype=np.int64)
    for start in range(0, present.shape[0], _ROWS):
        positive = present[start : start + _ROWS].astype(np.int64)
        counts += positive.T @ positive
    positives = np.asarray(counts.diagonal(), np.int64)
    counts.setdiag(0)
    counts.eliminate_zeros()
    counts.sort_indices()
    return counts, positives


def affinity(counts: Counts, positives: Positives, *, tau: float, side: str = "co") -> Float[np.ndarray, "k k"]:
    """Return the affinity between labels, f[K,K] (ML-VPT; CPSD).

    Let S[i,j] = counts[i,j] / positives[j] = p(i | j), and R = S^(1/tau) elementwise. A label without positives
    co-occurs with no other label: its entries of S are 0.

    Args:
      tau: τ > 0, the order of the root. 2 gives the published "co" groups of COCO. The published "dc" groups cannot be
        reproduced exactly. The closest values are 3 (COCO) and 4 (NUS-WIDE).
      side: "co", for labels that occur together: (R + Rᵀ)/2, with a zero diagonal. "dc", for labels that rarely occur
        together: the mean of 1 − R and its transpose, with ones on the diagonal (the "I" of the paper is the matrix of
        ones).
    """
    if side not in ("co", "dc") or not tau > 0:
        raise ValueError(f"side must be 'co' or 'dc', not {side!r}, and tau above 0, not {tau}")
    root = conditional_probabilities(counts, positives) ** (1 / tau)  # Rᵀ, since counts are symmetric
    together = (root + root.T) / 2
    return together if side == "co" else 1 - together


def group_labels(
    counts: Counts, positives: Positives, *, num_groups: int, tau: float, side: str, seed: int
) -> Int32[np.ndarray, " k"]:
    """Divide the labels into groups by spectral clustering of their affinity. Return the group of each label, i32[K].

    Spectral clustering with 20 k-means starts is run 4 times. The result with the highest Calinski-Harabasz score on
    the rows of the affinity is returned, as in CPSD. Equal inputs and seeds give equal groups. Groups are numbered in
    the order of their first labels: label 0 is in group 0, the first label outside group 0 is in group 1, … Equal
    partitions therefore give equal arrays. Groups are not merged: a group may have a single label. If k-means finds
    fewer groups than requested, because labels are identical, the highest group numbers are unused.

    Raises:
      UserError: `num_groups` is not in 1 (all labels in one group) … K (one label per group).
      ValueError: `side` is unknown, or `tau` is not above 0.
    """
    matrix = affinity(counts, positives, tau=tau, side=side)
    labels = len(matrix)
    if not 1 <= num_groups <= labels:
        raise UserError(
            f"{labels} labels cannot be divided into {num_groups} groups; set model.prompts.num_groups to 1 … {labels}"
        )
    if num_groups in (1, labels):
        return np.arange(labels, dtype=np.int32) % num_groups
    from sklearn.cluster import SpectralClustering  # here, because the import takes a second
    from sklearn.metrics import calinski_harabasz_score

    random = np.random.RandomState(seed)
    with warnings.catch_warnings():
        # The graph is often unconnected in small data sets, where many labels never occur together.
        warnings.filterwarnings("ignore", message="Graph is not fully connected")
        runs = [
            SpectralClustering(num_groups, affinity="precomputed", n_init=20, random_state=random).fit_predict(matrix)
            for _ in range(_RESTARTS)
        ]
    # The score is undefined if all labels are in one group.
    best = max(runs, key=lambda run: calinski_harabasz_score(matrix, run) if len(np.unique(run)) > 1 else -np.inf)
    _, first, group = np.unique(best, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[group].astype(np.int32)
