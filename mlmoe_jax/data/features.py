"""Features of images in the cache folder, which training reads in place of images if the backbone is frozen.

A table is a folder of .npy files, which are written whole and mapped into memory. Each part has one file per kind of
feature, and a file `read`, which is written last. A part without this file is computed again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from etils import epath
from jaxtyping import Bool, Float32

from mlmoe_jax.data.images import Images
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.files import cache_folder, damage_explained, make_cache
from mlmoe_jax.runtime.storage import atomic_file

PART_BYTES = 2**27  # limits the memory of a part, and what is computed again after an interruption
READ = "read"
OPEN = 256  # files that are mapped at a time; each needs a descriptor, and a process often has at most 1,024
Kinds = Mapping[str, tuple[tuple[int, ...], str]]  # kind of feature -> shape and type of the features of an image


@dataclass(frozen=True)
class FeatureTable:
    """A cache on disk of the backbone's features of N images, in parts of `part_rows` images.

    Attributes:
      kinds: name -> (shape, dtype) of the features of one image: `cls` [D] and `patches` [h,w,D].
      stored: the dtype in the files, float32 or float16.
    """

    folder: Path
    rows: int
    kinds: Kinds
    stored: str

    @property
    def row_bytes(self) -> int:
        """The number of bytes per image in the files."""
        return sum(math.prod(shape) for shape, _ in self.kinds.values()) * np.dtype(self.stored).itemsize

    @property
    def part_rows(self) -> int:
        """The number of images per part, except the last."""
        return max(1, PART_BYTES // self.row_bytes)

    def missing(self, is_readable: Callable[[int], bool] = lambda row: False) -> list[int]:
        """Return the parts to compute: those that are not in the cache, and those with an image that is readable again.

        `is_readable` is asked for the row of each image that could not be read before.
        """

        def is_stale(part: int) -> bool:
            return any(map(is_readable, self.list_rows(part)[~self._open(part, READ)].tolist()))

        parts = range(math.ceil(self.rows / self.part_rows))
        return [part for part in parts if not self._file(part, READ).exists() or is_stale(part)]

    def list_rows(self, part: int) -> np.ndarray:
        """Return the rows i64[n] of the n images in a part."""
        return np.arange(part * self.part_rows, min(self.rows, (part + 1) * self.part_rows))

    def write(self, part: int, features: Mapping[str, np.ndarray], read: np.ndarray) -> None:
        """Write the features [n,…] of the n images of a part, and `read` bool[n], whether each image could be read.

        Raises UserError if a feature is not finite in the dtype of the files, for instance too large for float16.
        """
        for kind, values in features.items():
            with np.errstate(over="ignore"):
                stored = values.astype(self.stored)
            if not np.isfinite(stored[read]).all():
                raise UserError(f"some features are not finite in {self.stored}; set data.cache_features=float32 or no")
            self._save(part, kind, stored)
        self._save(part, READ, read)
        _mapped.cache_clear()  # the files may be new versions of mapped files

    def __getitem__(self, row: int) -> Arrays | None:
        """Return the features of image `row` by kind, in the dtype of `kinds`; None if the image could not be read.

        Raises UserError if a file is damaged.
        """
        part, position = divmod(row, self.part_rows)
        if not self._open(part, READ)[position]:
            return None
        return {kind: self._open(part, kind)[position].astype(dtype) for kind, (_, dtype) in self.kinds.items()}

    def readable(self) -> tuple[Float32[np.ndarray, "n d"], Bool[np.ndarray, " rows"]]:
        """Return the features of the n readable images in a table of one kind, and whether each image is readable."""
        (kind,) = self.kinds
        rows = [self[row] for row in range(self.rows)]
        features = np.stack([row[kind] for row in rows if row]).astype(np.float32)
        return features, np.array([row is not None for row in rows])

    def blank(self) -> Arrays:
        """Return zeros with the shapes and dtypes of the features of one image, for padding."""
        return {kind: np.zeros(shape, dtype) for kind, (shape, dtype) in self.kinds.items()}

    def _file(self, part: int, kind: str) -> Path:
        return self.folder / f"{part:05d}.{kind}.npy"

    def _save(self, part: int, kind: str, values: np.ndarray) -> None:
        make_cache(self.folder)
        with atomic_file(epath.Path(self._file(part, kind))) as partial, open(partial, "wb") as file:
            np.save(file, values, allow_pickle=False)

    def _open(self, part: int, kind: str) -> np.ndarray:
        return _mapped(self._file(part, kind))


@functools.lru_cache(maxsize=OPEN)
def _mapped(path: Path) -> np.ndarray:
    with damage_explained(f"{path} of the cache, which may be deleted,"):
        return np.load(path, mmap_mode="r", allow_pickle=False)


def open_feature_table(
    images: Images,
    ids: Sequence[str],
    kinds: Kinds,
    stored: str,
    settings: Mapping[str, object],
) -> FeatureTable:
    """Return the feature cache of a split. Parts that have not been computed yet are listed by `missing`.

    `settings` are all further settings that the features depend on. Different settings use different folders in the
    cache.
    """
    digest = hashlib.sha256(json.dumps([kinds, stored, PART_BYTES, settings], sort_keys=True).encode())
    for row, name in enumerate(ids):
        digest.update(f"\n{name} {images.stamp(row)}".encode())
    folder = cache_folder() / "features" / digest.hexdigest()[:32]
    return FeatureTable(folder, len(ids), kinds, stored)
