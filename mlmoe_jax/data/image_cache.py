"""Images of a split at the size that does not change in training, in memory or in the cache folder.

Decoding and the resize are the same in every epoch, unless a crop is drawn from the image at its own size. Their
result, u8[S,S,3] for each image, is computed once; augmentation continues from there, so batches are the same with a
cache and without.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from PIL import Image, features

from mlmoe_jax.data.features import FeatureTable, megabytes, table_of
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.split import CachedImages, Split
from mlmoe_jax.data.transforms import make_host_transform, smallest_useful_side
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.machine import cores, free_memory
from mlmoe_jax.runtime.progress import Progress, status

AT_ONCE = 64  # images that are read together
SPARE = 0.2  # of the free memory, which is left for the rest of the program
_IMAGE, _CHECKSUM = "image", "crc"
Read = Callable[[np.ndarray], Generator[np.ndarray | None, None, None]]  # rows i64[n] -> images; None: unreadable


class Reader:
    """Reads the images of a split up to the part that is drawn anew each time.

    data_config: `config.data`. augment: `config.augment` for training, None for evaluation.
    """

    def __init__(self, split: Split, data_config: ConfigDict, augment: ConfigDict | None):
        options: dict[str, Any] = {"training": augment is not None}
        least = smallest_useful_side(data_config, augment, **options) if data_config.reduced_decoding else 0
        self.split, self.decoding = split, Decoding.of(data_config, least)
        self.geometry = make_host_transform(data_config, augment, **options).geometry
        self.skip = data_config.bad_images == "skip"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of each image; `config.validate` has refused a geometry for which there is none."""
        side = self.geometry.fixed_side
        return side, side, 3

    @property
    def bytes(self) -> int:
        """The bytes of all images."""
        return len(self.split) * int(np.prod(self.shape))

    def __call__(self, row: int) -> np.ndarray | None:
        """Return image `row`; None if it cannot be read and is left out. Raises BadImage if it is not left out."""
        try:
            return self.geometry.fixed(self.split.images.open(row, self.decoding))
        except BadImage:
            if not self.skip:
                raise
            return None

    def filled(self, cache: InMemory | OnDisk, where: str) -> Split:
        """Return the split with a cache, after reading what it lacks; where: it is, for the message."""
        split = self.split
        status(f"cache of {split.name}: {len(split):,} images, {megabytes(self.bytes)} {where}")
        cache.fill(self._read)
        return replace(split, cached=cache)

    def _read(self, rows: np.ndarray) -> Generator[np.ndarray | None, None, None]:
        """Yield the images `rows` in order, which all cores read."""
        progress = Progress(f"read {self.split.name}", -(-len(rows) // AT_ONCE), AT_ONCE)
        with ThreadPoolExecutor(cores()) as pool, contextlib.closing(progress):
            for first in range(0, len(rows), AT_ONCE):
                yield from pool.map(self, rows[first : first + AT_ONCE].tolist())
                progress.advance()

    def settings(self) -> dict[str, str]:
        """Return all that the images depend on besides the files."""
        geometry = self.geometry
        libraries = [Image.__version__, str(features.version("libjpeg_turbo"))]
        return {
            "geometry": f"{geometry.fit} {geometry.fixed_side} {geometry.crop_fraction}",
            "decoding": f"{self.decoding} {self.skip}",
            "libraries": " ".join(libraries),
        }


class InMemory(CachedImages):
    """Images u8[N,S,S,3] in memory."""

    def __init__(self, shape: tuple[int, ...], rows: int):
        self.images, self.present = np.empty((rows, *shape), np.uint8), np.zeros(rows, bool)

    def __getitem__(self, row: int) -> np.ndarray | None:
        return self.images[row] if self.present[row] else None

    def fill(self, read: Read) -> None:
        """Store what `read`, a function of rows, yields."""
        for row, image in enumerate(read(np.arange(len(self.images)))):
            if image is not None:
                self.images[row], self.present[row] = image, True
        self.images.flags.writeable = False


class OnDisk(CachedImages):
    """Images in a table of the cache folder, each with a checksum that is compared when it is first read."""

    def __init__(self, table: FeatureTable):
        self.table, self.compared = table, np.zeros(table.rows, bool)

    @classmethod
    def of(cls, reader: Reader) -> OnDisk:
        """Return the images of a reader, of which some or all may not be stored yet."""
        split, kinds = reader.split, {_IMAGE: (reader.shape, "uint8"), _CHECKSUM: ((4,), "uint8")}
        return cls(table_of(split.images, split.ids, kinds, "uint8", reader.settings(), place="images"))

    def __getitem__(self, row: int) -> np.ndarray | None:
        """Return an image, or None; UserError if its file is damaged."""
        found = self.table[row]
        if found is None:
            return None
        if not self.compared[row]:
            if not np.array_equal(_checksum(found[_IMAGE]), found[_CHECKSUM]):
                raise UserError(f"an image in {self.table.folder} is damaged; delete the folder, which is made again")
            self.compared[row] = True
        return found[_IMAGE]

    def fill(self, read: Read) -> None:
        """Store what `read`, a function of rows, yields for the parts that are missing."""
        if not (missing := self.table.missing()):
            return
        blank = self.table.blank()[_IMAGE]
        with contextlib.closing(read(np.concatenate([self.table.rows_of(part) for part in missing]))) as images:
            for part in missing:
                of_part = list(itertools.islice(images, len(self.table.rows_of(part))))
                present = np.array([image is not None for image in of_part])
                stored = np.stack([blank if image is None else image for image in of_part])
                checksums = np.stack([_checksum(image) for image in stored])
                self.table.write(part, {_IMAGE: stored, _CHECKSUM: checksums}, present)


def _checksum(image: np.ndarray) -> np.ndarray:
    return np.frombuffer(zlib.crc32(np.ascontiguousarray(image)).to_bytes(4, "little"), np.uint8)


def with_cache(splits: Sequence[tuple[Split, ConfigDict | None]], data_config: ConfigDict) -> list[Split]:
    """Return splits that read their images from a cache of the kind `data.cache`, `ram` or `disk`.

    splits: pairs of a split and `config.augment` for training, or None for evaluation. The images that are not in the
    cache are read. Raises UserError if memory or disk have no room for all of them, before any is read, and BadImage.
    """
    readers = [Reader(split, data_config, augment) for split, augment in splits]
    if data_config.cache == "ram":
        _require_memory(sum(reader.bytes for reader in readers))
        return [reader.filled(InMemory(reader.shape, len(reader.split)), "in memory") for reader in readers]
    caches = [OnDisk.of(reader) for reader in readers]
    needed = {cache.table.folder: cache.table.bytes_of(cache.table.missing()) for cache in caches}
    for cache in caches:
        cache.table.require_space(sum(needed.values()), "the images of data.cache=disk", "data.cache=none")
    return [
        reader.filled(cache, f"in {cache.table.folder}{'' if cache.table.missing() else ', already there'}")
        for reader, cache in zip(readers, caches, strict=True)
    ]


def _require_memory(needed: int) -> None:
    if needed > (1 - SPARE) * (free := free_memory()):
        raise UserError(
            f"data.cache=ram needs {megabytes(needed)} of memory, and {megabytes(free)} are free, of which "
            f"{SPARE:.0%} stay for the rest: set data.cache=disk or none, or a smaller data.image_size"
        )
