"""The images of a training split that are held out for validation.

Shape letters: N images, K labels.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from mlmoe_jax.data.split import POSITIVE

Rows = NDArray[np.int64]


def draw_random(labels: NDArray[np.int8], count: int, seed: int) -> Rows:
    """Draw `count` of N images regardless of their labels i8[N,K]; return their rows i64[count], increasing."""
    return np.sort(np.random.RandomState(seed).permutation(len(labels))[:count])


def draw_stratified(labels: NDArray[np.int8], count: int, seed: int) -> Rows:
    """Draw `count` of N images so that each label has the same share of its images in both parts.

    A label with two images or more gets at least one in each part; if the parts have no room for all of these, the
    rarest labels come first. This is the iterative stratification of K. Sechidis, G. Tsoumakas and I. Vlahavas ("On the
    stratification of multi-label data", ECML PKDD 2011) with parts of exact size; the seed draws the order of images.

    labels: codes i8[N,K] of `data.split`; only POSITIVE counts. Returns rows i64[count], increasing.
    """
    by_image = csr_array(labels == POSITIVE)
    images = by_image.shape[0]
    order = np.random.RandomState(seed).permutation(images)
    by_label = by_image[order].tocsc()
    left = np.diff(by_label.indptr).astype(np.int64)  # images of each label that are in no part yet
    # The images that each label lacks in the held-out part and in the rest, times N so that they are integers.
    least = np.minimum(left // 2, 1) * images
    share = np.clip(left * count, least, left * images - least)
    lacking = [share.tolist(), (left * images - share).tolist()]
    room = [count, images - count]
    part = np.full(images, -1)

    def put(image: int, into: int) -> None:
        part[image] = into
        room[into] -= 1
        for label in by_image.indices[by_image.indptr[image] : by_image.indptr[image + 1]]:
            lacking[into][label] -= images
            left[label] -= 1

    while left.any():
        rarest = int(np.where(left > 0, left, images + 1).argmin())
        for image in order[by_label.indices[by_label.indptr[rarest] : by_label.indptr[rarest + 1]]]:
            if part[image] < 0:
                need = [(lacking[into][rarest], room[into]) for into in (0, 1)]
                put(image, int(not room[0] or (room[1] > 0 and need[1] >= need[0])))
    without = order[part[order] < 0]  # labels
    part[without[: room[0]]] = 0
    return np.flatnonzero(part == 0)


# data.split_rule -> (labels i8[N,K], count, seed) -> rows
RULES: Mapping[str, Callable[[NDArray[np.int8], int, int], Rows]] = {
    "stratified": draw_stratified,
    "random": draw_random,
}
