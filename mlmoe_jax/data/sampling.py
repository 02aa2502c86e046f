"""Draw images by a hash of their names, so that the order of a table does not matter.

A unit is a group of images, such as the images of a patient, or an image without a group. The images of a unit stay
together. Shape letters: N images, K labels, G units, F folds.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Integer, UInt64
from scipy.sparse import csc_array, csr_array, hstack

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.label_matrix import LabelMatrix
from mlmoe_jax.runtime.text import compose


def hash_names(names: Iterable[str], seed: int | str = "") -> UInt64[np.ndarray, " n"]:
    """Return a number of 64 bits per name: the first 8 bytes, big-endian, of the sha256 of `SEED NUL NAME`.

    The seed is a decimal number or empty. Names are hashed as UTF-8 in the form NFC, which no file system changes.
    """
    texts = (f"{seed}\0{compose(name)}".encode(errors="surrogatepass") for name in names)
    return np.frombuffer(b"".join(hashlib.sha256(text).digest()[:8] for text in texts), ">u8").astype(np.uint64)


def draw_held_out(units: Iterable[str], fraction: float, seed: int) -> Bool[np.ndarray, " n"]:
    """Return which images are held out: those whose unit has a hash below `fraction` · 2⁶⁴.

    Whether an image is held out does not depend on other images, so no image moves from one part to the other if the
    table grows, shrinks or has another order. There is one exception, in small tables: if no hash is that small, the
    unit with the least hash is held out, so that the result is not empty. That unit returns to training once the table
    has a unit with a smaller hash. A larger fraction only adds images.

    Such a draw cannot be stratified: the number of held-out images and the shares of the labels among them vary as in
    any random draw.

    Args:
      units: the name of the unit of each image, as in `Split.units`.
      fraction: the expected fraction of held-out units.
      seed: the seed of the hashes, see `hash_names`.
    """
    values = hash_names(units, seed) / 2.0**64
    return (values < fraction) | (values == values.min(initial=1))


@functools.lru_cache(maxsize=1)
def _repeat_ends(labels: LabelMatrix, threshold: float) -> Float[np.ndarray, " n"]:
    """Return the cumulative sum of the repeat factors of the images, scaled to the sum N."""
    present = labels.marked(POSITIVE)
    frequency = np.maximum(present.sum(axis=0), 1) / max(1, len(labels))
    factors = present * np.maximum(1, np.sqrt(threshold / frequency))
    ends = np.cumsum(np.maximum(1, factors.max(axis=1).toarray().ravel()))
    return ends * (len(labels) / ends[-1])


def draw_rows(
    places: Int[np.ndarray, " b"], first: int, labels: LabelMatrix, threshold: float, seed: int
) -> Int[np.ndarray, " b"]:
    """Return the rows of images, in which an image with rare labels is more often (`data.repeat_factor`).

    The repeat factor of a label with the frequency f is max(1, √(threshold / f)), and that of an image the largest of
    its positive labels (A. Gupta, P. Dollár and R. Girshick, "LVIS: A Dataset for Large Vocabulary Instance
    Segmentation", CVPR 2019). An epoch has N images with and without repetition. An image is in it as often as its
    share of all factors says, rounded up or down by a number that is drawn per epoch.

    Args:
      places: numbers from 0 to N − 1 at random; an epoch has each once.
      first: the number of places before these, in all epochs.
      threshold: the frequency below which a label is rare. 0 returns `places`.
    """
    if not threshold:
        return places
    epochs = (first + np.arange(len(places))) // len(labels)
    shifts = {epoch: np.random.default_rng([seed, epoch]).random() for epoch in np.unique(epochs).tolist()}
    shifted = places + np.array([shifts[epoch] for epoch in epochs.tolist()])
    rows = np.searchsorted(_repeat_ends(labels, threshold), shifted, side="right")
    return np.minimum(rows, len(labels) - 1)


def assign_folds(
    labels: Integer[np.ndarray, "n k"], count: int, seed: int, units: Sequence[str] | None = None
) -> Int[np.ndarray, " n"]:
    """Return the fold of each image, from 0. Folds have about equal sizes and about equal shares of each label.

    No fold is empty.

    The folds depend neither on the order of the images nor on the order of the labels. Labels are assigned from the
    rarest to the most frequent, by the number of images that have no fold yet. Each unit goes to the fold that lacks
    most images of the label, as in the iterative stratification of K. Sechidis, G. Tsoumakas and I. Vlahavas ("On the
    stratification of multi-label data", ECML PKDD 2011). A fold with enough space for the unit has priority. If all
    units are single images, the folds therefore have equal sizes.

    Args:
      labels: label codes [N,K]. Only POSITIVE counts.
      count: the number of folds, at most the number of units.
      seed: the seed of the order in which units with equally many images are assigned.
      units: the name of the unit of each image, as in `Split.units`. None: each image is a unit, named by its row.
    """
    names, unit = np.unique([str(row) for row in range(len(labels))] if units is None else units, return_inverse=True)
    rank = np.argsort(np.argsort(hash_names(names, seed), kind="stable"))
    return _fill_folds(_count_images(labels, rank[unit]), count)[rank[unit]]


def _fill_folds(table: csc_array, count: int) -> Int[np.ndarray, " g"]:
    """Return the fold of each unit, below the number of folds `count`; see `assign_folds` and `_count_images`."""
    by_unit, remaining = csr_array(table), table.sum(axis=0)
    lacking, fold = np.tile(remaining, (count, 1)), np.full(table.shape[0], -1)  # `lacking` is multiplied by `count`
    images = remaining[-1]
    last = images * (np.arange(len(remaining)) == len(remaining) - 1)  # images without a label come last
    while remaining.any():
        label = int(np.where(remaining > 0, remaining + last, 3 * images).argmin())
        column = slice(*table.indptr[label : label + 2])
        for row in table.indices[column][np.argsort(-table.data[column], kind="stable")]:
            if fold[row] < 0:
                entries = slice(*by_unit.indptr[row : row + 2])
                columns, size = by_unit.indices[entries], by_unit.data[entries]
                space = lacking[:, -1]
                fold[row] = np.lexsort((space, lacking[:, label], np.minimum(space, count * size[-1])))[-1]
                lacking[fold[row], columns] -= count * size
                remaining[columns] -= size
    return fold


def _count_images(labels: Integer[np.ndarray, "n k"], unit: Int[np.ndarray, " n"]) -> csc_array:
    """Return sparse i64[G,K+1]: for each unit, the number of images with each label, then the number of all images.

    `unit` has the number of each image's unit. The columns of the K labels are sorted by their content, so that the
    result does not depend on the order of the labels.
    """
    members = csr_array((np.ones_like(unit), (unit, np.arange(len(unit)))))
    present = csr_array(labels == POSITIVE).astype(np.int64)
    table = csc_array(members @ hstack([present, np.ones((len(unit), 1), np.int64)], format="csr"))
    table.sort_indices()
    parts = [slice(*table.indptr[label : label + 2]) for label in range(labels.shape[1])]
    key = [(table.indices[part].tobytes(), table.data[part].tobytes()) for part in parts]
    return table[:, [*sorted(range(len(key)), key=key.__getitem__), len(key)]]
