"""Acquisition functions of active learning, which choose the images to label next.

Shape letters: N images, K labels, D features, M labeled images, C chosen images.
* `uncertain` chooses the images with the highest uncertainty (D. D. Lewis and W. A. Gale, "A sequential algorithm for
  training text classifiers", SIGIR 1994): the mean entropy of the predicted labels, in which rare labels have larger
  weights.
* `diverse` chooses one after another the image with the largest distance to its nearest chosen or labeled image (T. F.
  Gonzalez, "Clustering to minimize the maximum intercluster distance", Theoretical Computer Science 38, 1985). The
  largest distance of an image to its nearest chosen image is then at most twice the optimum. O. Sener and S. Savarese
  ("Active learning for convolutional neural networks: a core-set approach", ICLR 2018) use it for active learning.
* `both` is like `diverse`, with the squared distances multiplied by the uncertainty.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int

LABELED_PER_MATMUL = 256  # labeled images whose distances are computed at once
TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Candidates:
    """The images from which to choose.

    Attributes:
      uncertainty: f64[N], see `entropy`.
      features: f32[N,D], scaled to Euclidean norm 1, see `normalize`.
      labeled: f32[M,D], the scaled features of the images that have labels already; M may be 0.
    """

    uncertainty: Float[np.ndarray, " n"]
    features: Float32[np.ndarray, "n d"]
    labeled: Float32[np.ndarray, "m d"]


def entropy(scores: Float[np.ndarray, "n k"], weights: Float[np.ndarray, " k"]) -> Float[np.ndarray, " n"]:
    """Return the weighted mean over labels of the binary entropy in bits, 0 for probabilities 0 and 1, and 1 for ½."""
    present, absent = np.maximum(scores, TINY), np.maximum(1 - scores, TINY)
    return -(scores * np.log2(present) + (1 - scores) * np.log2(absent)) @ (weights / weights.sum())


def rarity(positives: Int[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """Return the weight of each label, 1/√(n + 1), where n is the number of training images with the label."""
    return 1 / np.sqrt(positives + 1)


def normalize(features: Float[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    """Return each feature vector scaled to Euclidean norm 1. Zero vectors stay zero.

    The squared distance between two scaled vectors with cosine similarity c is 2 − 2c.
    """
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return (features / np.maximum(lengths, TINY)).astype(np.float32)


def farthest_first(
    candidates: Candidates,
    count: int,
    *,
    weights: Float[np.ndarray, " n"] | float,
    advance: Callable[[], None],
) -> tuple[Int[np.ndarray, " c"], Float[np.ndarray, " c"]]:
    """Choose `count` images, at most N, one after another by farthest-first traversal.

    The next image maximizes the product of its weight and its squared distance to the nearest center: a labeled image
    or an image chosen so far. Ties are broken by the order of the images. If there is no labeled image, the first image
    is chosen by its distance to the mean of all features. Each choice costs one pass over the features and calls
    `advance`. The additional memory is O(N). `weights` is f64[N], or one number for all.

    Returns the rows of the chosen images in the order of the choice, and their distances to the nearest center at that
    time.
    """
    features, labeled = candidates.features, candidates.labeled
    squares = _squared_lengths(features)
    nearest = np.full(len(features), np.inf, np.float32)
    free = np.ones(len(features), bool)
    for start in range(0, len(labeled), LABELED_PER_MATMUL):
        _approach(nearest, features, squares, labeled[start : start + LABELED_PER_MATMUL])
    if not len(labeled):
        to_mean = nearest.copy()
        _approach(to_mean, features, squares, features.mean(axis=0, keepdims=True))
    rows, distances = [], []
    for _ in range(count):
        squared = nearest if rows or len(labeled) else to_mean
        row = int(np.where(free, weights * squared, -1).argmax())
        rows.append(row)
        distances.append(squared[row])
        free[row] = False
        _approach(nearest, features, squares, features[row : row + 1])
        advance()
    return np.array(rows, np.int64), np.sqrt(distances)


def _approach(
    nearest: Float32[np.ndarray, " n"],
    features: Float32[np.ndarray, "n d"],
    squares: Float32[np.ndarray, " n"],
    centers: Float32[np.ndarray, "m d"],
) -> None:
    """Lower the squared distances `nearest` in place for new `centers`; `squares` are squared norms of `features`."""
    gaps = features @ centers.T
    gaps *= -2
    gaps += _squared_lengths(centers)
    np.minimum(nearest, np.maximum(squares + gaps.min(axis=1), 0), out=nearest)


def _squared_lengths(features: Float32[np.ndarray, "n d"]) -> Float32[np.ndarray, " n"]:
    return np.einsum("nd,nd->n", features, features)


METHODS = ("uncertain", "diverse", "both")  # values of --select


def choose_images(
    method: str, candidates: Candidates, count: int, advance: Callable[[], None] = lambda: None
) -> tuple[Int[np.ndarray, " c"], Float[np.ndarray, " c"] | None]:
    """Choose the images to label next by one of METHODS.

    Returns the rows in the order in which to label them, and the distances as in `farthest_first`. For `uncertain`, the
    distances are None, and `advance`, which shows progress, is not called.
    """
    if method == "uncertain":
        return np.argsort(-candidates.uncertainty, kind="stable")[:count], None
    weights = candidates.uncertainty if method == "both" else 1.0
    return farthest_first(candidates, count, weights=weights, advance=advance)
