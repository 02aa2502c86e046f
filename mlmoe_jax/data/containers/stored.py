"""What images in Parquet and in tar files share: the parts of the files, and what the cache folder keeps of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlmoe_jax.data.containers.reach import version_of
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.images import MOST_FAR, EncodedImages, InParts
from mlmoe_jax.errors import DiskError, UserError, reason_of
from mlmoe_jax.runtime.files import cache_folder
from mlmoe_jax.runtime.storage import cached_file

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(eq=False)
class StoredImages(InParts, EncodedImages):
    """Images in files, in the order of the files. A subclass defines `name`, `read_stored` and `find_rows`.

    Attributes:
      folder: path or address of the folder of the files.
      names: the files below it.
      title: the folder in the names of images, which is the address from which the files were downloaded.
      versions: the version of each file when it was opened, see `version_of`.
      ends: i64[p] of all p parts of the files, the number of images up to the end of each.
    """

    folder: str
    names: Sequence[str]
    title: str
    versions: Sequence[str]
    ends: np.ndarray
    most_opened = MOST_FAR

    def encoded(self, row: int) -> bytes:
        with self.reading(row):
            return self.read_stored(*self.locate(row))

    @contextlib.contextmanager
    def reading(self, row: int) -> Iterator[None]:
        """Convert errors in the block to a BadImage with the name of image `row`, unless it is not their cause."""
        try:
            yield
        except (BadImage, ChangedFile, DiskError):
            raise
        except (OSError, UserError) as error:
            raise BadImage(f"cannot read {self.name(row)} as an image: {reason_of(error)}") from error


class ChangedFile(UserError):
    """A file is no longer in the version that was opened, so its labels may belong to other images."""


def require_version(path: str, version: str) -> None:
    """Raise ChangedFile if a file no longer has this version. It is called after reading, also after errors."""
    if version_of(path) != version:
        raise ChangedFile(f"{path} has changed since it was opened; repeat the command")


def cache_batches(
    path: str, version: str, kind: str, key: str, part: str, read: Callable[[], Iterator[pa.RecordBatch]]
) -> str:
    """Return the path of a file of Arrow with what `read` yields, a batch or more. The cache has it, or it is written.

    It is in the folder `kind`, for a `part` of this version of the file `path`. `key` is what else it depends on.
    Raises ChangedFile if the file has another version when it was read.
    """

    def write(partial: Path) -> None:
        try:
            _write_batches(str(partial), read())
        finally:
            require_version(path, version)

    place = path if "://" in path else os.path.abspath(path)
    digest = hashlib.sha256(f"{place} {version} {key}".encode()).hexdigest()
    stored = cached_file(cache_folder() / kind / f"{digest}{part}.arrow", write)
    os.utime(stored)
    return stored


def _write_batches(path: str, batches: Iterator[pa.RecordBatch]) -> None:
    import pyarrow as pa  # here, because --help does without it

    first = next(batches)
    with pa.ipc.new_file(path, first.schema) as writer:
        for batch in itertools.chain([first], batches):
            writer.write_batch(batch)
