"""Groups of images, such as the images of a patient, that are never in two parts of a data set.

`Split.groups` has a name per image. An image with the name "" is a group of its own. Shape letters: N images, K labels,
G groups.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int, Integer
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack

from mlmoe_jax.data.label_codes import POSITIVE

CANDIDATES = 64  # groups of a round, tried one by one and in pairs
SIZE_WEIGHT = 10  # of the number of images among the labels
UNIT = 1 << 20  # the integer that stands for 1 in costs


def draw_groups(
    labels: Integer[np.ndarray, "n k"], groups: Int[np.ndarray, " n"], count: int, seed: int
) -> Int[np.ndarray, " m"]:
    """Draw whole groups of about `count` of the N images, so that each label has about the same share in both parts.

    A random draw is improved by moving one or two groups at a time to the other part, as long as this lowers
    Σ (n − t)² / t over both parts and all labels, where n is a number of images and t its goal. The number of all
    images has a goal too. Goals are proportional, but a label of several groups should have an image in each part.
    Costs are integers, so that every machine draws the same groups.

    Args:
      labels: label codes. Only POSITIVE counts.
      groups: the number of each image's group.
      count: the number of images to draw.
      seed: seed of the random draw.

    Returns:
      The rows, increasing. Both parts have a group, unless there is only one group, which is not drawn.
    """
    names, group = np.unique(groups, return_inverse=True)
    if len(names) < 2:
        return np.zeros(0, np.int64)
    counts = _count_images(labels, group)
    inside = _draw_inside(np.bincount(group), count, seed)
    goals, weights = _goals(counts, count, len(labels))
    _improve(inside, counts, goals, weights)
    return np.flatnonzero(inside[group])


def _draw_inside(sizes: Int[np.ndarray, " g"], count: int, seed: int) -> Bool[np.ndarray, " g"]:
    """Draw groups of about `count` images; at least one group is drawn, and one is not."""
    order = np.random.RandomState(seed).permutation(len(sizes))
    drawn = np.searchsorted(np.cumsum(sizes[order]), count, side="right")
    inside = np.zeros(len(sizes), bool)
    inside[order[: np.clip(drawn, 1, len(sizes) - 1)]] = True
    return inside


def _goals(counts: csr_array, count: int, images: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the goal t per label, and for all images, of the drawn part; and the weights of the cost, both i64[K+1].

    A weight is the sum of 1/t over both parts.

    Args:
      counts: result of `_count_images`.
      count: the number of images to draw.
      images: the number of all images.
    """
    totals = counts.sum(axis=0)
    several = np.minimum((counts > 0).sum(axis=0) // 2, 1)
    goals = np.clip((2 * totals * count + images) // (2 * images), several, totals - several)
    weights = sum(np.rint(UNIT / np.maximum(goal, 1)).astype(np.int64) for goal in (goals, totals - goals))
    weights[-1] *= SIZE_WEIGHT
    return goals, weights


def _count_images(labels: NDArray[np.int8], group: NDArray[np.int64]) -> csr_array:
    """Return i64[G,K+1]: for each group, the number of its images with each label, then of all its images."""
    members = csr_array((np.ones_like(group), (group, np.arange(len(group)))))
    present = csr_array(labels == POSITIVE).astype(np.int64)
    return csr_array(members @ hstack([present, np.ones((len(group), 1), np.int64)], format="csr"))


def _improve(
    inside: Bool[np.ndarray, " g"], counts: csr_array, goals: NDArray[np.int64], weights: NDArray[np.int64]
) -> None:
    """Move groups in and out of `inside`, the best one or two at a time, as long as the cost Σ w (n − t)² falls."""
    excess, alone = counts.T @ inside.astype(np.int64) - goals, counts.power(2) @ weights
    while True:
        sign = np.where(inside, -1, 1)
        costs = 2 * sign * (counts @ (excess * weights)) + alone
        best = np.argsort(costs, kind="stable")[:CANDIDATES]
        moves = counts[best].multiply(sign[best, None]).tocsr()
        pairs = costs[best] + costs[best, None] + 2 * (moves.multiply(weights) @ moves.T).toarray()
        size = inside.sum() + sign[best] + sign[best, None]
        np.fill_diagonal(pairs, costs[best])  # a group with itself is one move
        np.fill_diagonal(size, inside.sum() + sign[best])
        pairs[(size < 1) | (size >= len(inside))] = 0
        pair = np.unique(np.unravel_index(pairs.argmin(), pairs.shape))
        if pairs.min() >= 0:
            return
        inside[best[pair]] ^= True
        excess += moves[pair].sum(axis=0)
