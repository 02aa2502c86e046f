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
    """Draw `count` of N images. Each label has about the same share of its images in the drawn part as in the rest.

    A label with two or more images has at least one image in both parts. If the parts are too small for this, the
    rarest labels have priority. The method is the iterative stratification of K. Sechidis, G. Tsoumakas and I. Vlahavas
    ("On the stratification of multi-label data", ECML PKDD 2011) with parts of exact size.

    Args:
      labels: label codes [N,K]. Only POSITIVE counts.
      count: number of images to draw.
      seed: seed of the order of the images.
      groups: [N], the number of each image's group. If given, whole groups are drawn, see `draw_groups`.

    Returns:
      The rows of the drawn images, increasing. With groups, the number of rows is only about `count`.
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
    """The state of the iterative stratification: two parts to which images are assigned one by one.

    Attributes:
      part: i64[N], the part of each image: HELD_OUT, REST, or −1 if the image is not assigned yet.
      remaining: i64[K], the number of images of each label that are not assigned yet.
      lacking: for each part, a list with the number of images of each label that the part still needs. The numbers are
        multiplied by N so that they are integers.
      capacity: for each part, the number of images that it still needs.
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
        """Return the label with the fewest images that are not assigned yet, at least one."""
        return int(np.where(self.remaining > 0, self.remaining, self.images + 1).argmin())

    def neediest_part(self, label: int) -> int:
        """Return the part to which the next image of a label is assigned.

        It is the part that needs most images of the label. Ties are broken by the number of images that a part still
        needs. A full part is never returned.
        """
        if not self.capacity[HELD_OUT]:
            return REST
        if self.capacity[REST] <= 0:
            return HELD_OUT
        held_out, rest = ((self.lacking[part][label], self.capacity[part]) for part in (HELD_OUT, REST))
        return REST if rest >= held_out else HELD_OUT

    def put(self, image: int, part: int) -> None:
        """Assign an image to a part."""
        self.part[image] = part
        self.capacity[part] -= 1
        for label in self.by_image.indices[self.by_image.indptr[image] : self.by_image.indptr[image + 1]]:
            self.lacking[part][label] -= self.images
            self.remaining[label] -= 1


# --------------------------------------------------------------------------------------------------------------- groups
def draw_groups(
    labels: Integer[np.ndarray, "n k"], groups: Int[np.ndarray, " n"], count: int, seed: int
) -> Int[np.ndarray, " m"]:
    """Draw whole groups with about `count` of N images.

    Each label has about the same share in the drawn part and the rest. The method starts with a random draw. It moves
    one or two groups at a time to the other part as long as this lowers the cost Σ (n − t)² / t. The sum is over both
    parts and all labels, n is the number of images with the label in the part, and t is the goal of n. The total number
    of images in a part has a goal too. Goals are proportional to the sizes of the parts, except that a label of two or
    more groups should have an image in each part. Costs are integers, so that every machine draws the same groups.

    Args:
      labels: label codes [N,K]. Only POSITIVE counts.
      groups: [N], the number of each image's group.
      count: the number of images to draw.
      seed: seed of the random draw.

    Returns:
      The rows of the drawn images, increasing. Both parts have at least one group. If there is only one group, no image
        is drawn.
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
    """Draw random groups with about `count` images. Return bool[G], whether a group is drawn.

    At least one group is drawn, and at least one group is not.

    Args:
      sizes: [G], the number of images of each group.
      count: the number of images to draw.
      seed: seed of the draw.
    """
    order = np.random.RandomState(seed).permutation(len(sizes))
    drawn = np.searchsorted(np.cumsum(sizes[order]), count, side="right")
    inside = np.zeros(len(sizes), bool)
    inside[order[: np.clip(drawn, 1, len(sizes) - 1)]] = True
    return inside


def _goals(counts: csr_array, count: int, images: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the goals and the weights of the cost in `draw_groups`.

    Args:
      counts: the result of `_count_images`.
      count: the number of images to draw.
      images: the number of all images.

    Returns:
      goals: i64[K+1], the goal t in the drawn part for each label, then for all images.
      weights: i64[K+1], the sum of 1/t over both parts, scaled and rounded to integers.
    """
    totals = counts.sum(axis=0)
    several = np.minimum((counts > 0).sum(axis=0) // 2, 1)
    goals = np.clip((2 * totals * count + images) // (2 * images), several, totals - several)
    weights = sum(np.rint(UNIT / np.maximum(goal, 1)).astype(np.int64) for goal in (goals, totals - goals))
    weights[-1] *= SIZE_WEIGHT
    return goals, weights


def _count_images(labels: NDArray[np.int8], group: NDArray[np.int64]) -> csr_array:
    """Return sparse i64[G,K+1]: for each group, the number of images with each label, then the number of all images.

    Args:
      labels: label codes [N,K].
      group: [N], the number of each image's group.
    """
    members = csr_array((np.ones_like(group), (group, np.arange(len(group)))))
    present = csr_array(labels == POSITIVE).astype(np.int64)
    return csr_array(members @ hstack([present, np.ones((len(group), 1), np.int64)], format="csr"))


def _improve(
    inside: Bool[np.ndarray, " g"], counts: csr_array, goals: NDArray[np.int64], weights: NDArray[np.int64]
) -> None:
    """Change `inside` in place, one or two groups at a time, as long as the cost Σ w (n − t)² becomes lower.

    Args:
      inside: bool[G], whether a group is in the drawn part.
      counts: the result of `_count_images`.
      goals: i64[K+1], t, see `_goals`.
      weights: i64[K+1], w, see `_goals`.
    """
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
