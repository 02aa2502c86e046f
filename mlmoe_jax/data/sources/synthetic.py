"""`synthetic`: images generated on access, for any number of labels, without a download.

For timing and for large label spaces. An image is a mosaic of 4 × 4 tiles: three colored tiles and 13 gray tiles. A
label is one color at one position, so all labels can be learned.
"""

import functools

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import RenderedImages
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError

SPLIT_SIZES = {"train": 2_000, "val": 500, "test": 500}
SIDE, TILES, LABELS_PER_IMAGE, NOISE = 64, 4, 3, 16  # pixels per side, tiles per side, labels per image, ± gray levels
FEWEST_LABELS = TILES**2  # labels, so that each position has a color


def open_synthetic(data_config: ConfigDict, split: str) -> Split:
    """Open a split of generated images with `data.labels` labels, see SPLIT_SIZES."""
    labels = data_config.labels
    if labels < FEWEST_LABELS:
        raise UserError(f"data.labels is {labels} and should be at least {FEWEST_LABELS}, one label per tile")
    count, stream = SPLIT_SIZES[split], list(SPLIT_SIZES).index(split)
    table = np.zeros((count, labels), np.int8)
    for row in range(count):
        table[row, _draw_labels(labels, stream, row)] = 1
    names = tuple(f"label {k}" for k in range(labels))
    images = RenderedImages(count, functools.partial(_render_mosaic, labels, stream), are_decoded=False)
    return Split(split, names, table, [f"{split}/{row:05d}" for row in range(count)], images)


def _draw_labels(count: int, stream: int, row: int) -> np.ndarray:
    """Return the labels of image `row`, of `count`. Each of them is at a different position of the mosaic."""
    random = np.random.default_rng((stream, row, 0))
    positions = random.choice(TILES**2, LABELS_PER_IMAGE, replace=False)
    colors = random.random(LABELS_PER_IMAGE) * ((count - 1 - positions) // TILES**2 + 1)
    return positions + TILES**2 * colors.astype(int)


def _render_mosaic(count: int, stream: int, row: int) -> np.ndarray:
    tiles = np.full((TILES**2, 3), 128)
    labels = _draw_labels(count, stream, row)
    tiles[labels % TILES**2] = _color(labels // TILES**2, -(-count // TILES**2))
    image = tiles.reshape(TILES, TILES, 3).repeat(SIDE // TILES, axis=0).repeat(SIDE // TILES, axis=1)
    noise = np.random.default_rng((stream, row, 1)).integers(-NOISE, NOISE + 1, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


def _color(number: np.ndarray, count: int) -> np.ndarray:
    """Return the colors i64[n,3] with the given numbers. The `count` colors are spread evenly over all RGB levels."""
    levels = 1
    while levels**3 < count:
        levels += 1
    digits = np.stack([number, number // levels, number // levels**2], axis=-1) % levels
    return 32 + digits * (191 // max(1, levels - 1))


SYNTHETIC = DataSource(open_synthetic, splits=tuple(SPLIT_SIZES))
