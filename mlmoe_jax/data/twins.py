"""Find images that are nearly equal, such as frames of a clip, bursts, and augmented copies of a photograph.

Such twins are one unit when images are drawn for folds or held out. Otherwise a model is measured on images that it was
trained on. Images are compared by the cosine of `describe` minus its mean, so the variety of the data sets the scale.
Features of a backbone would find more, but a backbone that was trained on similar labels gives one label's images
nearly equal features. Shape letters: N, M images, D numbers per vector.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
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
SIMILAR_HISTOGRAMS = 0.75  # of 1,947 photographs, no two that differ exceed it by `describe`
STRICTER = 0.9, 0.95  # for uniform data, in which a lower limit joins most images
MOST_JOINED = 0.5  # share of the images in one unit that a limit may reach
MOST_COMPARED = 200_000  # comparing all pairs of more images would take many minutes
FEW, COPIES = 20, 0.97  # fewer images are compared as they are, with this limit
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


def similar_blocks(
    first: Float[np.ndarray, "n ..."], second: Float[np.ndarray, "m ..."], limit: float
) -> Iterator[tuple[int, Bool[np.ndarray, "b n"]]]:
    """Yield (start, similar): whether each image of `second` from `start` on is similar to each image of `first`.

    Mirrored images are similar, too, if the vectors are of `describe`. Vectors of 0 are similar to none. Fewer than FEW
    images have no mean that says what is common to all images, so their vectors are compared as they are.
    """
    first, second = _normalize(first), _normalize(second)
    whole = np.concatenate([first, second])
    few = len(whole) < FEW
    mean = np.zeros_like(whole[0]) if few else whole.mean(axis=0)
    sides = [second]
    if second.shape[1:] == HISTOGRAM_SHAPE:
        sides.append(np.roll(second[:, :, ::-1, ::-1], 1, axis=-1))
    columns, *sides = (_center(vectors, mean) for vectors in (first, *sides))
    step = max(1, BLOCK_PAIRS // len(first))
    for start in range(0, len(second), step):
        cosines = np.maximum.reduce([vectors[start : start + step] @ columns.T for vectors in sides])
        yield start, cosines > (COPIES if few else limit)


def _normalize(vectors: Float[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n ..."]:
    """Return vectors of length 1. Vectors of 0 stay 0."""
    flat = np.asarray(vectors, np.float32).reshape(len(vectors), -1)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    return (flat / np.where(lengths > 0, lengths, 1)).reshape(vectors.shape)


def _center(vectors: Float32[np.ndarray, "n ..."], mean: Float32[np.ndarray, ...]) -> Float32[np.ndarray, "n d"]:
    """Return the normalized differences from the mean. Vectors of 0 stay 0."""
    flat = vectors.reshape(len(vectors), -1)
    return _normalize(np.where(flat.any(axis=1, keepdims=True), flat - mean.ravel(), 0))


def find_units(vectors: Float[np.ndarray, "n ..."], limit: float) -> Int[np.ndarray, " n"]:
    """Return the number of each image's unit. Similar images are in one unit, and so are chains of them.

    If more than MOST_JOINED of the images would be in one unit, the limits STRICTER are tried in turn. If the last one
    joins as many, each image is a unit, and a warning is logged.
    """
    alone = np.arange(len(vectors))
    for bound in (limit, *STRICTER):
        unit = alone
        for start, similar in similar_blocks(vectors, vectors, bound):
            rows, columns = np.nonzero(similar)
            ends = unit[start + rows], unit[columns]
            links = coo_array((np.ones(len(rows), bool), ends), shape=(len(unit), len(unit)))
            unit = connected_components(links, directed=False)[1][unit]
        largest = int(np.bincount(unit, minlength=1).max())
        if largest <= max(1, MOST_JOINED * len(unit)):
            return unit
    _logger.warning(
        f"{largest:,} of {len(unit):,} images are nearly equal, so no two of them are kept together in folds or held "
        "out together; if they are of few scenes, the metrics are too good: set data.group_column"
    )
    return alone


def join_twins(split: Split, data_config: ConfigDict) -> Split:
    """Return the split with the units of `find_units` as groups of images that have no group; a group given wins.

    The name of a unit is the least id in it. The number of joined images is printed.
    """
    if len(split) > MOST_COMPARED:
        status(f"nearly equal images are not searched among more than {MOST_COMPARED:,} images")
        return split
    given = np.array(split.groups or [""] * len(split), object)
    rows = np.flatnonzero(given == "")
    if len(rows) < FEW:
        return split
    unit = find_units(read_histograms(split, data_config)[rows], SIMILAR_HISTOGRAMS)
    members = [rows[unit == number] for number in np.flatnonzero(np.bincount(unit, minlength=1) > 1)]
    if not members:
        return split
    for places in members:
        given[places] = min(split.ids[row] for row in places)
    status(
        f"{quantity(sum(map(len, members)), 'image')} of {split.name} are nearly equal to another one, and are kept "
        f"together as {quantity(len(members), 'group')}; data.join_twins=False treats them apart"
    )
    return replace(split, groups=given.tolist())


def read_histograms(split: Split, data_config: ConfigDict) -> Float32[np.ndarray, "n 8 8 8"]:
    """Return `describe` of all images, from the cache if it has them. Images that cannot be read have 0."""
    decoding = Decoding.from_config(data_config, at_least=2 * CELLS * CELL_SIDE)
    kinds = {HISTOGRAM: (HISTOGRAM_SHAPE, "float32")}
    table = open_feature_table(split.images, split.ids, kinds, "float16", {HISTOGRAM: asdict(decoding)})

    def read(row: int) -> Float32[np.ndarray, "8 8 8"] | None:
        try:
            return describe(split.images.read(row, decoding))
        except BadImage:
            return None

    with contextlib.closing(Progress("similar images", len(split), 1)) as progress, ThreadPoolExecutor(cores()) as pool:
        for part in table.missing():
            histograms = []
            for histogram in pool.map(read, table.list_rows(part).tolist()):
                histograms.append(histogram)
                progress.advance()
            is_read = np.array([histogram is not None for histogram in histograms])
            blank = np.zeros(HISTOGRAM_SHAPE, np.float32)
            table.write(
                part,
                {HISTOGRAM: np.stack([blank if histogram is None else histogram for histogram in histograms])},
                is_read,
            )
    rows = (table[row] or table.blank() for row in range(table.rows))
    return np.stack([row[HISTOGRAM] for row in rows])
