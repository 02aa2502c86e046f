"""Acquisition functions of active learning, which choose the images to label next. N images, K labels, D features.

`uncertain` takes the highest uncertainty (D. D. Lewis and W. A. Gale, "A sequential algorithm for training text
classifiers", SIGIR 1994): the entropy of the predicted labels, of which rare labels count more.

`diverse` takes centers one after another, each farthest from all before it (T. F. Gonzalez, "Clustering to minimize the
maximum intercluster distance", Theoretical Computer Science 38, 1985). The largest distance of an image to its center
is then at most twice the least possible one. O. Sener and S. Savarese ("Active learning for convolutional neural
networks: a core-set approach", ICLR 2018) label these centers.

`both` weights the squared distances by the uncertainty.
"""

from __future__ import annotations

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
      uncertainty: see `entropy`.
      features: features of length 1, see `normalize`.
      labeled: features of the images that have labels; there may be none.
    """

    uncertainty: Float[np.ndarray, " n"]
    features: Float32[np.ndarray, "n d"]
    labeled: Float32[np.ndarray, "m d"]


def entropy(scores: Float[np.ndarray, "n k"], weights: Float[np.ndarray, " k"]) -> Float[np.ndarray, " n"]:
    """Return the weighted mean over labels of the entropy in bits.

    It is 0 if all labels are certain, and 1 if all scores are 1/2.
    """
    present, absent = np.maximum(scores, TINY), np.maximum(1 - scores, TINY)
    return -(scores * np.log2(present) + (1 - scores) * np.log2(absent)) @ (weights / weights.sum())


def rarity(positives: Int[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """Return the weight of each label, 1/√(n + 1) for n training images with the label."""
    return 1 / np.sqrt(positives + 1)


def normalize(features: Float[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    """Return features scaled to length 1. Zeros stay zeros.

    The squared distance of two scaled vectors is 2 − 2 · their cosine.
    """
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return (features / np.maximum(lengths, TINY)).astype(np.float32)


def farthest_first(
    candidates: Candidates,
    count: int,
    *,
    weights: Float[np.ndarray, " n"] | float = 1.0,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Int[np.ndarray, " c"], Float[np.ndarray, " c"]]:
    """Choose images one after another, each far from the labeled images and from all images before it.

    The next image has the largest product of its weight and its squared distance to the nearest of these images. Of
    equal products, the first image is next. If there is no such image yet, the distance is to the mean of all. An image
    costs one pass over the features, and the memory beside the features is O(N).

    Args:
      candidates: the N images.
      count: number of images to choose, at most N.
      weights: factors of the squared distances.
      advance: called once per chosen image.

    Returns:
      The rows of the images in their order, and their distances when they were chosen.
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
    """Update `nearest` in place for additional centers.

    Args:
      nearest: the squared distance of each image to its nearest center.
      features: features of the images.
      squares: squared lengths of the features.
      centers: features of the additional centers.
    """
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
    """Choose `count` images with one of METHODS, calling `advance` once per image.

    Returns the rows of the images, the first to label first, and their distances. `uncertain` has no distances.
    """
    if method == "uncertain":
        return np.argsort(-candidates.uncertainty, kind="stable")[:count], None
    weights = candidates.uncertainty if method == "both" else 1.0
    return farthest_first(candidates, count, weights=weights, advance=advance)
