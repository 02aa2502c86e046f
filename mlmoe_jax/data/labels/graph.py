"""The graph along which ML-GCN sends information between labels, from how they come together in training.

Chen, Wei, Wang and Guo, "Multi-label image recognition with graph convolutional networks", CVPR 2019. Shape letter: K
labels.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.errors import UserError

# The authors' code adds it to the number of a label's edges, which may be none.
_EPSILON = 1e-6


def conditional_probabilities(counts: ArrayLike, positives: ArrayLike) -> NDArray[np.float64]:
    """P[i,j] = counts[i,j] / positives[i] = p(label j | label i) (ML-GCN, eq. 6).

    Args:
      counts: i64[K,K], images that show both labels, zero diagonal.
      positives: i64[K], images that show the label.

    Returns:
      f64[K,K]; the row of a label without positives is 0.
    """
    counts, positives = np.asarray(counts, np.float64), np.asarray(positives, np.float64)[:, None]
    return np.divide(counts, positives, out=np.zeros_like(counts), where=positives > 0)


def label_graph(
    counts: ArrayLike, positives: ArrayLike, *, threshold: float = 0.4, share: float = 0.2, transpose: bool = True
) -> NDArray[np.float32]:
    """The normalised adjacency Ā of ML-GCN's layers H ← act(Ā H W).

    An edge goes from label i to label j where p(j | i) ≥ threshold (eq. 7), B[i,j] = 1. The neighbours of a label have
    together the weight `share`, the label itself 1 − share (eq. 8); the scale of the weights cancels in Ā, so that the
    code's 0.25 beside a diagonal of 1 is share = 0.2.

    transpose: as the authors' code has it. W = share/(1 − share)·B/(column sums of B + 1e-6) + I and
    Ā = diag(d) Wᵀ diag(d) with d = (row sums of W)^(−1/2): a label listens to those that imply it (`person` to 55 of
    COCO's 80), and degrees and weights are those of opposite directions. Without it as eq. 8 reads: row sums in W, and
    Ā = diag(d) W diag(d): a label listens to those that it implies.

    Args:
      counts: i64[K,K], zero diagonal.
      positives: i64[K].
      threshold: τ in (0, 1].
      share: p in [0, 1).
      transpose: see above.

    Returns:
      f32[K,K]; the identity where no edge is.

    Raises:
      UserError: threshold or share outside its range.
    """
    if not 0 < threshold <= 1:
        raise UserError(f"the threshold of the label graph must be above 0 and at most 1, not {threshold}")
    if not 0 <= share < 1:
        raise UserError(f"the share of a label's neighbours in the label graph must be in 0 … 1 without 1, not {share}")
    edges = (conditional_probabilities(counts, positives) >= threshold).astype(np.float64)
    degree = edges.sum(axis=0 if transpose else 1, keepdims=True)
    weights = share / (1 - share) * edges / (degree + _EPSILON) + np.eye(len(edges))
    scale = weights.sum(axis=1) ** -0.5
    directed = weights.T if transpose else weights
    return (scale[:, None] * directed * scale).astype(np.float32)


def frequency_order(positives: ArrayLike) -> NDArray[np.int32]:
    """Return i32[K], the labels by decreasing number of positives i64[K]; of equals, the first comes first."""
    return np.argsort(-np.asarray(positives, np.int64), kind="stable").astype(np.int32)
