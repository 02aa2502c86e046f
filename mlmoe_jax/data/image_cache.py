"""Decoded and resized images of a split in the cache folder (`data.cache=disk`).

Decoding and resizing are deterministic, unless a crop is drawn from the image at its own size. Their result, u8[S,S,3]
per image, is computed once. Augmentation starts from this result, so the cache does not change the batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from ml_collections import ConfigDict
from PIL import Image, features

from mlmoe_jax.data.features import FeatureTable, table_of
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import Progress, megabytes, status

AT_ONCE = 64  # images per call of the thread pool


def with_cache(splits: Sequence[tuple[Split, ConfigDict | None]], data_config: ConfigDict) -> list[Split]:
    """Return splits that read their images from the cache, after storing the missing images.

    Args:
      splits: pairs of a split and `config.augment` for training, or None for evaluation.
      data_config: `config.data`.

    Raises:
      UserError: the disk has no space for all images. No image has been read.
      BadImage: an image cannot be read, and is not skipped.
    """
    readers = [ImageReader.of(data_config, augment) for _, augment in splits]
    tables = [_table(split, reader, data_config) for (split, _), reader in zip(splits, readers, strict=True)]
    needed = {table.folder: table.bytes_of(table.missing()) for table in tables}
    for table in tables:
        table.require_space(sum(needed.values()), "the images of data.cache=disk", "data.cache=none")
    for (split, _), reader, table in zip(splits, readers, tables, strict=True):
        missing = table.missing()  # a split before may have had the same images
        size = f"{len(split):,} images, {megabytes(len(split) * table.row_bytes)} in {table.folder}"
        status(f"cache of {split.name}: {size}{'' if missing else ', already there'}")
        if missing:
            _fill(table, missing, split, reader)
    return [replace(split, cached=table) for (split, _), table in zip(splits, tables, strict=True)]


def _table(split: Split, reader: ImageReader, data_config: ConfigDict) -> FeatureTable:
    """Return the table of a split. Its settings are everything that the stored images depend on."""
    geometry = reader.geometry
    side = geometry.fixed_side  # above 0, because `config.validate` refuses other geometries
    settings = {
        "geometry": [geometry.fit, side, geometry.crop_fraction],
        "decoding": [str(reader.decoding), data_config.bad_images],
        "libraries": [Image.__version__, str(features.version("libjpeg_turbo"))],
    }
    return table_of(split.images, split.ids, {"image": ((side, side, 3), "uint8")}, "uint8", settings, place="images")


def _fill(table: FeatureTable, missing: list[int], split: Split, reader: ImageReader) -> None:
    def read_all(rows: list[int]) -> Iterator[np.ndarray | None]:
        for first in range(0, len(rows), AT_ONCE):
            yield from pool.map(partial(reader.fixed, split.images), rows[first : first + AT_ONCE])
            progress.advance()

    blank = table.blank()["image"]
    parts = {part: table.rows_of(part).tolist() for part in missing}
    progress = Progress(f"read {split.name}", sum(-(-len(rows) // AT_ONCE) for rows in parts.values()), AT_ONCE)
    with ThreadPoolExecutor(cores()) as pool, contextlib.closing(progress):
        for part, rows in parts.items():
            images = list(read_all(rows))
            present = np.array([image is not None for image in images])
            stored = np.stack([blank if image is None else image for image in images])
            table.write(part, {"image": stored}, present)
