"""Draw images for a part of a data set so that each label has about the same share in both parts.

Images of a group, such as the images of a patient, are never in two parts. Shape letters: N images, K labels, G groups.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int, Integer
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack

from mlmoe_jax.data.label_codes import POSITIVE

HELD_OUT, REST = 0, 1
CANDIDATES = 64  # groups of a round, tried one by one and in pairs
SIZE_WEIGHT = 10  # of the number of images among the labels
UNIT = 1 << 20  # the integer that stands for 1 in costs


def draw_stratified(
    labels: Integer[np.ndarray, "n k"], count: int, seed: int, groups: Int[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " m"]:
    """Draw `count` of N images so that each label has about the same fraction of its images in both parts.

    A label with two images or more gets at least one in each part. If the parts are too small for this, the rarest
    labels come first. This is the iterative stratification of K. Sechidis, G. Tsoumakas and I. Vlahavas ("On the
    stratification of multi-label data", ECML PKDD 2011) with parts of exact size.

    Args:
      labels: label codes. Only POSITIVE counts.
      count: number of images to draw.
      seed: seed of the order of the images.
      groups: number of each image's group; whole groups are then drawn, see `draw_groups`.

    Returns:
      The rows, increasing. With groups, their number is about `count`.
    """
    if groups is not None:
        return draw_groups(labels, groups, count, seed)
    by_image = csr_array(labels == POSITIVE)
    order = np.random.RandomState(seed).permutation(len(labels))
    by_label = by_image[order].tocsc()
    parts = _Parts(by_image, np.diff(by_label.indptr), count)
    while parts.remaining.any():
        label = parts.rarest_label()
        for image in order[by_label.indices[by_label.indptr[label] : by_label.indptr[label + 1]]]:
            if parts.part[image] < 0:
                parts.put(image, parts.neediest_part(label))
    unlabeled = order[parts.part[order] < 0]
    parts.part[unlabeled[: parts.capacity[HELD_OUT]]] = HELD_OUT
    return np.flatnonzero(parts.part == HELD_OUT)


class _Parts:
    """The two parts while images are put into them.

    Attributes:
      part: i64[N], the part of each image: HELD_OUT, REST, or -1 for none yet.
      remaining: i64[K], the number of images of each label that are in no part yet.
      lacking: for each part, the number of images that each label lacks, times N so that it is an integer.
      capacity: for each part, the number of images that it lacks.
    """

    def __init__(self, by_image: csr_array, counts: Int[np.ndarray, " k"], count: int):
        images = by_image.shape[0]
        self.by_image, self.images = by_image, images
        self.part = np.full(images, -1)
        self.remaining = counts.astype(np.int64)
        least = np.minimum(self.remaining // 2, 1) * images
        share = np.clip(self.remaining * count, least, self.remaining * images - least)
        self.lacking = [share.tolist(), (self.remaining * images - share).tolist()]
        self.capacity = [count, images - count]

    def rarest_label(self) -> int:
        """Return the label with the fewest remaining images."""
        return int(np.where(self.remaining > 0, self.remaining, self.images + 1).argmin())

    def neediest_part(self, label: int) -> int:
        """Return the part that lacks most images of a label, or most images at all, and is not full."""
        if not self.capacity[HELD_OUT]:
            return REST
        if self.capacity[REST] <= 0:
            return HELD_OUT
        held_out, rest = ((self.lacking[part][label], self.capacity[part]) for part in (HELD_OUT, REST))
        return REST if rest >= held_out else HELD_OUT

    def put(self, image: int, part: int) -> None:
        """Put an image into a part."""
        self.part[image] = part
        self.capacity[part] -= 1
        for label in self.by_image.indices[self.by_image.indptr[image] : self.by_image.indptr[image + 1]]:
            self.lacking[part][label] -= self.images
            self.remaining[label] -= 1


# --------------------------------------------------------------------------------------------------------------- groups
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
