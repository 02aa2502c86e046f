"""The label graph of ML-GCN, computed from the co-occurrence of labels in training.

Chen, Wei, Wang and Guo, "Multi-label image recognition with graph convolutional networks", CVPR 2019. Axis: k
labels.
"""

import numpy as np
from jaxtyping import Float, Int32, Num

# The authors' code adds this to the number of edges of a label, which may be 0.
_EPSILON = 1e-6

Counts = Num[np.ndarray, "k k"]  # the number of images with both labels, with a zero diagonal
Positives = Num[np.ndarray, " k"]  # the number of images with each label


def conditional_probabilities(counts: Counts, positives: Positives) -> Float[np.ndarray, "k k"]:
    """Return P[i,j] = counts[i,j] / positives[i] = p(label j | label i) (ML-GCN, eq. 6).

    The row of a label without positives is 0.
    """
    counts, positives = np.asarray(counts, np.float64), np.asarray(positives, np.float64)[:, None]
    return np.divide(counts, positives, out=np.zeros_like(counts), where=positives > 0)


def label_graph(
    counts: Counts, positives: Positives, *, threshold: float = 0.4, share: float = 0.2, transpose: bool = True
) -> Float[np.ndarray, "k k"]:
    """Return the normalized adjacency Ā of ML-GCN's layers H ← act(Ā H W).

    There is an edge from label i to label j, B[i,j] = 1, if p(j | i) ≥ threshold (ML-GCN, eq. 7). The neighbors of a
    label have the total weight `share` and the label itself has 1 − share (ML-GCN, eq. 8). The scale of the weights
    cancels in Ā, so the authors' 0.25 with a diagonal of 1 equals share = 0.2.

    transpose=True follows the authors' code: W = share/(1 − share)·B/(column sums of B + 1e-6) + I and
    Ā = diag(d) Wᵀ diag(d) with d = (row sums of W)^(−1/2). A label receives information from the labels that imply it
    (`person` from 55 of the 80 labels of COCO); its degrees and weights belong to opposite directions.
    transpose=False follows ML-GCN, eq. 8: row sums in W, and Ā = diag(d) W diag(d). A label receives information from
    the labels that it implies.

    Args:
      counts: see Counts.
      positives: see Positives.
      threshold: τ in (0, 1].
      share: p in [0, 1).
      transpose: see above.

    Returns:
      The identity if there are no edges.
    """
    edges = (conditional_probabilities(counts, positives) >= threshold).astype(np.float64)
    degree = edges.sum(axis=0 if transpose else 1, keepdims=True)
    weights = share / (1 - share) * edges / (degree + _EPSILON) + np.eye(len(edges))
    scale = weights.sum(axis=1) ** -0.5
    directed = weights.T if transpose else weights
    return (scale[:, None] * directed * scale).astype(np.float32)


def frequency_order(positives: Positives) -> Int32[np.ndarray, " k"]:
    """Return the labels by decreasing number of positives; ties keep their order."""
    return np.argsort(-np.asarray(positives, np.int64), kind="stable").astype(np.int32)
