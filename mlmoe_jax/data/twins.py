"""Find images that are nearly equal, such as frames of a clip, bursts, and augmented copies of a photograph.

Such twins are one unit when images are drawn for folds or held out. Otherwise a model is measured on images that it was
trained on. Vectors of images are compared by the cosine of their differences from the mean, so the variety of the data
sets the scale. Shape letters: N, M images, D numbers per vector.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8
from ml_collections import ConfigDict
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mlmoe_jax.data.decoding import BadImage, Decoding
from mlmoe_jax.data.features import open_feature_table
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import quantity

_logger = logging.getLogger(__name__)

CELLS, CELL_SIDE, BINS = 8, 8, 8  # histograms of gradient directions in `describe`
PLAIN = 1  # a gradient of at most as many gray levels per pixel is noise
HISTOGRAM = "histogram"  # the kind of `describe` in the cache
HISTOGRAM_SHAPE = (CELLS, CELLS, BINS)
SIMILAR_HISTOGRAMS = 0.83  # of 1,947 photographs and 13,000 scenes of digits, hardly any have a greater cosine
SIMILAR_FEATURES, SUPPORT = 0.7, 0.4  # also similar: both cosines, of features and histograms, are greater
# A backbone that was trained on similar labels gives images of one label similar features. The features have no say if
# the histograms of a smaller share of the similar ones support them.
MOST_SUPPORTED = 0.8
MOST_JOINED = 0.5  # share of the images that a unit may have
MOST_COMPARED = 200_000  # comparing all pairs of more images would take many minutes
FEW, COPIES = 20, 0.97  # fewer images are compared without their mean, with this limit
BLOCK_PAIRS = 2**23  # pairs that are compared at a time


def describe(pixels: UInt8[np.ndarray, "h w 3"]) -> Float32[np.ndarray, "8 8 8"]:
    """Return the strength of gradients by direction in 8×8 cells of an image. Plain images have only 0."""
    side = CELLS * CELL_SIDE
    gray = Image.fromarray(pixels).convert("L").resize((side, side), Image.Resampling.BOX)
    rise, run = np.gradient(np.asarray(gray, np.float32))
    strength = np.hypot(rise, run)
    strength[strength <= PLAIN] = 0
    direction = np.arctan2(rise, run) * (BINS / np.pi)
    distance = np.abs((direction[..., None] - np.arange(BINS) + BINS / 2) % BINS - BINS / 2)
    shares = strength[..., None] * np.maximum(0, 1 - distance)
    return np.sqrt(shares.reshape(CELLS, CELL_SIDE, CELLS, CELL_SIDE, BINS).sum(axis=(1, 3)))


def cosine_blocks(
    first: Float[np.ndarray, "n ..."], second: Float[np.ndarray, "m ..."]
) -> Iterator[tuple[int, Float32[np.ndarray, "b n"]]]:
    """Yield (start, cosines): of the images of `second` from `start` on, and all images of `first`.

    Of an image and its mirror image, the more similar one counts if the vectors are from `describe`. Vectors of 0 have
    cosines of 0. Fewer than FEW vectors have no mean that says what is common to all images; they are compared as they
    are.
    """
    sides = [first, second]
    if first.shape[1:] == HISTOGRAM_SHAPE:
        sides.append(np.roll(second[:, :, ::-1, ::-1], 1, axis=-1))
    sides = [_normalize(side.reshape(len(side), -1).astype(np.float32)) for side in sides]
    count = len(first) + len(second)
    mean = (sides[0].sum(axis=0) + sides[1].sum(axis=0)) / count if count >= FEW else 0
    columns, *sides = (_normalize((side - mean) * side.any(axis=1, keepdims=True)) for side in sides)
    step = max(1, BLOCK_PAIRS // len(first))
    for start in range(0, len(second), step):
        yield start, np.maximum.reduce([vectors[start : start + step] @ columns.T for vectors in sides])


def _normalize(vectors: Float32[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    """Return vectors of length 1. Vectors of 0 stay 0."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


def find_units(
    histograms: Float[np.ndarray, "n 8 8 8"], features: Float[np.ndarray, "n d"] | None = None
) -> Int[np.ndarray, " n"]:
    """Return the number of each image's unit. Similar images are in one unit, and so are chains of them.

    Images are similar by their histograms, or by `features` with the support of the histograms. If one unit had more
    than MOST_JOINED of the images, each image is a unit, and a warning is logged.
    """
    alone = unit = wider = np.arange(len(histograms))
    found = supported = 0
    blocks = cosine_blocks(histograms, histograms)
    feature_blocks = itertools.repeat(None) if features is None else cosine_blocks(features, features)
    for (start, cosines), feature_block in zip(blocks, feature_blocks, strict=False):
        unit = _join(unit, start, cosines > SIMILAR_HISTOGRAMS)
        if feature_block is None:
            continue
        near = feature_block[1] > SIMILAR_FEATURES
        near &= alone != alone[start : start + len(near), None]
        twins = near & (cosines > SUPPORT)
        found += np.count_nonzero(near)
        supported += np.count_nonzero(twins)
        wider = _join(wider, start, (cosines > SIMILAR_HISTOGRAMS) | twins)
    if features is not None and supported >= MOST_SUPPORTED * found:
        unit = wider
    largest = int(np.bincount(unit, minlength=1).max())
    if largest <= max(1, MOST_JOINED * len(unit)):
        return unit
    _logger.warning(
        f"{largest:,} of {len(unit):,} images are nearly equal, so no two of them are kept together in folds or held "
        "out together; if they are of few scenes, the metrics are too good: set data.group_column"
    )
    return alone


def _join(unit: Int[np.ndarray, " n"], start: int, similar: Bool[np.ndarray, "b n"]) -> Int[np.ndarray, " n"]:
    """Return the numbers of the units after the images from `start` on are joined with those that are similar."""
    rows, columns = np.nonzero(similar)
    links = coo_array((np.ones(len(rows), bool), (unit[start + rows], unit[columns])), shape=(len(unit), len(unit)))
    return connected_components(links, directed=False)[1][unit]


def similar_pairs(
    first: Float[np.ndarray, "n 8 8 8"], second: Float[np.ndarray, "m 8 8 8"], *, same: bool
) -> list[tuple[int, int]]:
    """Return the pairs (i, j) for which first[i] and second[j], of `describe`, are nearly equal.

    Each j is in at most one pair, with the smallest such i. `same` is whether both arrays are of one split. If so, only
    pairs with i < j are returned.
    """
    if not (len(first) and len(second)):
        return []
    limit = COPIES if len(first) + len(second) < FEW else SIMILAR_HISTOGRAMS
    pairs = []
    for start, cosines in cosine_blocks(first, second):
        close = cosines > limit
        if same:
            close &= np.arange(len(first)) < np.arange(start, start + len(close))[:, None]
        rows = np.flatnonzero(close.any(axis=1))
        pairs += zip(close[rows].argmax(axis=1).tolist(), (start + rows).tolist(), strict=True)
    return pairs


def join_twins(split: Split, data_config: ConfigDict, features: Float[np.ndarray, "n d"] | None = None) -> Split:
    """Return the split with the units of `find_units` as groups of images that have no group; a group given wins.

    The name of a unit is the least id in it. The number of joined images is printed. Without `data.join_twins`, the
    split is returned as it is.
    """
    if not data_config.join_twins:
        return split
    if len(split) > MOST_COMPARED:
        status(f"nearly equal images are not searched among more than {MOST_COMPARED:,} images")
        return split
    given = np.array(split.groups or [""] * len(split), object)
    rows = np.flatnonzero(given == "")
    if len(rows) < FEW:
        return split
    histograms = read_histograms(split, data_config)[rows]
    unit = find_units(histograms, None if features is None else features[rows])
    members = [rows[unit == number] for number in np.flatnonzero(np.bincount(unit) > 1)]
    for places in members:
        given[places] = min(split.ids[row] for row in places)
    if not members:
        return split
    status(
        f"{quantity(sum(map(len, members)), 'image')} of {split.name} are nearly equal to another one, and are kept "
        f"together as {quantity(len(members), 'group')}; data.join_twins=False treats them apart"
    )
    return replace(split, groups=given.tolist())


def shared_twins(train: Split, others: Iterable[Split], data_config: ConfigDict) -> list[str]:
    """Return a sentence about the images of each split that are nearly equal to training images; [] if there are none.

    Without `data.join_twins`, and among more than MOST_COMPARED images, none are searched.
    """
    sentences, known = [], None
    for split in others if data_config.join_twins else ():
        if split is train:
            continue
        if len(train) + len(split) > MOST_COMPARED:
            status(f"images of {split.name} are not compared with training images: more than {MOST_COMPARED:,} images")
            continue
        known = read_histograms(train, data_config) if known is None else known
        if pairs := similar_pairs(known, read_histograms(split, data_config), same=False):
            i, j = pairs[0]
            sentences.append(
                f"{len(pairs):,} of the {len(split):,} images of split {split.name} are nearly equal to training "
                f"images, such as {split.ids[j]} to {train.ids[i]}, so results on them are too good; move all images "
                "of a scene into one split"
            )
    return sentences


def read_histograms(split: Split, data_config: ConfigDict) -> Float32[np.ndarray, "n 8 8 8"]:
    """Return `describe` of all images, from the cache if it has them. Images that cannot be read have 0."""
    decoding = Decoding.from_config(data_config, at_least=2 * CELLS * CELL_SIDE)
    kinds = {HISTOGRAM: (HISTOGRAM_SHAPE, "float32")}
    table = open_feature_table(split.images, split.ids, kinds, "float16", {HISTOGRAM: asdict(decoding)})

    def read(row: int) -> Float32[np.ndarray, "8 8 8"]:
        try:
            return describe(split.images.read(row, decoding))
        except BadImage:
            return np.zeros(HISTOGRAM_SHAPE, np.float32)

    with contextlib.closing(Progress("similar images", len(split), 1)) as progress, ThreadPoolExecutor(cores()) as pool:
        for part in table.missing():
            histograms = []
            for histogram in pool.map(read, table.list_rows(part).tolist()):
                histograms.append(histogram)
                progress.advance()
            table.write(part, {HISTOGRAM: np.stack(histograms)}, np.ones(len(histograms), bool))
    return table.readable()[0]
