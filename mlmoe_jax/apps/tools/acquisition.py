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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int

BLOCK = 256  # labeled images whose distances are computed by one matmul
TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Candidates:
    """The images from which to choose.

    Attributes:
      uncertainty: see `entropy`.
      features: features of length 1, see `unit`.
      labeled: features of the images that have labels; there may be none.
    """

    uncertainty: Float[np.ndarray, " n"]
    features: Float32[np.ndarray, "n d"]
    labeled: Float32[np.ndarray, "m d"]


def entropy(scores: Float[np.ndarray, "n k"], weights: Float[np.ndarray, " k"]) -> Float[np.ndarray, " n"]:
    """Return the weighted mean over labels of the entropy in bits: 0 for certain labels, 1 if all scores are 1/2."""
    present, absent = np.maximum(scores, TINY), np.maximum(1 - scores, TINY)
    return -(scores * np.log2(present) + (1 - scores) * np.log2(absent)) @ (weights / weights.sum())


def rarity(positives: Int[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    """Return the weight of each label, 1/√(n + 1) for n training images with the label."""
    return 1 / np.sqrt(positives + 1)


def unit(features: Float[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    """Return features scaled to length 1, whose squared distance is 2 − 2 · their cosine; zeros stay zeros."""
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

    The next image has the largest product of its weight and its squared distance to the nearest of these images, and of
    equal products the first. If there is no such image yet, the distance is to the mean of all. An image costs one pass
    over the features, and the memory beside the features is O(N).

    Args:
      candidates: the N images.
      count: number of images to choose, at most N.
      weights: factors of the squared distances.
      advance: called once per chosen image.

    Returns:
      The rows of the images in their order, and their distances when they were chosen.
    """
    features, labeled = candidates.features, candidates.labeled
    squares = np.einsum("nd,nd->n", features, features)
    nearest, free = np.full(len(features), np.inf, np.float32), np.ones(len(features), bool)

    def approach(centers: Float32[np.ndarray, "m d"], nearest: Float32[np.ndarray, " n"]) -> None:
        gaps = features @ centers.T
        gaps *= -2
        gaps += np.einsum("md,md->m", centers, centers)
        np.minimum(nearest, np.maximum(squares + gaps.min(axis=1), 0), out=nearest)

    for low in range(0, len(labeled), BLOCK):
        approach(labeled[low : low + BLOCK], nearest)
    if not len(labeled):
        first = nearest.copy()
        approach(features.mean(axis=0, keepdims=True), first)
    rows, distances = [], []
    for _ in range(count):
        gain = nearest if rows or len(labeled) else first
        row = int(np.where(free, weights * gain, -1).argmax())
        rows.append(row)
        distances.append(gain[row])
        free[row] = False
        approach(features[row : row + 1], nearest)
        advance()
    return np.array(rows, np.int64), np.sqrt(distances)


Choice = tuple[Int[np.ndarray, " c"], Float[np.ndarray, " c"] | None]

# Value of --select -> a function of candidates, a count and `advance` that returns the rows and, with features, the
# distances of the chosen images, the first to label first.
METHODS: Mapping[str, Callable[[Candidates, int, Callable[[], None]], Choice]] = {
    "uncertain": lambda images, count, advance: (np.argsort(-images.uncertainty, kind="stable")[:count], None),
    "diverse": lambda images, count, advance: farthest_first(images, count, advance=advance),
    "both": lambda images, count, advance: farthest_first(images, count, weights=images.uncertainty, advance=advance),
}
