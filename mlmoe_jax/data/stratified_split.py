"""Draw images for a part of a data set so that each label has about the same share in both parts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Integer
from scipy.sparse import csr_array

from mlmoe_jax.data.group_split import draw_groups
from mlmoe_jax.data.label_codes import POSITIVE

HELD_OUT, REST = 0, 1


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
      groups: number of each image's group; whole groups are then drawn, see `group_split.draw_groups`.

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
