"""The images of a run: those that its values were trained on, and those that its training evaluates.

The file images.npz has a hash of each image id, see `data.sampling.hash_names`. An id can be found in it, not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from jaxtyping import UInt64

from mlmoe_jax.data.sampling import hash_names
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import sample_digests
from mlmoe_jax.runs.folder import IMAGES, RunFolder
from mlmoe_jax.runtime.text import abbreviate


@dataclass(frozen=True)
class ImageRecord:
    """Hashes of the ids of the images of a run, and of the contents of some.

    Attributes:
      trained: the training images, in the order of the training split.
      evaluated: the images that the training evaluates.
      earlier: images on which the values were trained before: in the run from which the training started, or in this
        run before it was resumed.
      contents: of a sample of these images, in the order of the splits.
    """

    trained: UInt64[np.ndarray, " n"]
    evaluated: UInt64[np.ndarray, " m"]
    earlier: UInt64[np.ndarray, " e"]
    contents: UInt64[np.ndarray, " c"]

    @classmethod
    def of(cls, trained: Iterable[str], evaluated: Iterable[str], contents: Iterable[str] = ()) -> ImageRecord:
        """Return the record of the ids of training images and of evaluated images, and of contents of some."""
        return cls(hash_names(trained), hash_names(evaluated), hash_names(()), hash_names(contents))

    def after(self, other: ImageRecord) -> ImageRecord:
        """Return this record for a training that starts from the run with the record `other`."""
        return replace(self, earlier=np.union1d(other.trained, other.earlier))

    def has_images_of(self, other: ImageRecord) -> bool:
        """Return whether the images, their order and the sampled contents are those of the record `other`."""
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("trained", "evaluated", "contents")
        )

    def find_trained(self, ids: Sequence[str]) -> list[str]:
        """Return the images in `ids` that the values were trained on."""
        hits = np.isin(hash_names(ids), np.concatenate([self.trained, self.earlier]))
        return [ids[row] for row in np.flatnonzero(hits)]

    def find_evaluated(self, ids: Sequence[str]) -> list[str]:
        """Return the images in `ids` that the training evaluates."""
        return [ids[row] for row in np.flatnonzero(np.isin(hash_names(ids), self.evaluated))]

    def write(self, folder: RunFolder) -> None:
        """Write the record to a run folder."""
        folder.write_npz(IMAGES, **asdict(self))


def read_image_record(folder: RunFolder) -> ImageRecord | None:
    """Return the record in a run folder; None if the folder has no record. A shared model never has one."""
    return folder.read_npz(IMAGES, _from_arrays) if (folder / IMAGES).exists() else None


def describe_leak(record: ImageRecord, folder: RunFolder, split: str, ids: Sequence[str]) -> str:
    """Return a clause about the images `ids` of a split that a run's values were trained on; "" if there are none."""
    leaked = record.find_trained(ids)
    if not leaked:
        return ""
    others = np.setdiff1d(record.earlier, record.trained).size  # a resumed run has its own images here too
    runs = f"{folder} or of a run that it started from" if others else folder
    return (
        f"{len(leaked):,} of the {len(ids):,} images of split {split} are, by their names, training images of {runs}, "
        f"so results on them are too good: {abbreviate(leaked)}"
    )


def warn_of_change(folder: RunFolder, split: Split) -> None:
    """Log a warning if a split is no longer as a run was trained with it, such as in a file that was replaced.

    A sample of its images is read, see `sample_digests`. A split with none of the images of the run is another one.
    """
    record = read_image_record(folder)
    if record is None:
        return
    ids = hash_names(split.ids)
    known, before = max({np.isin(ids, part).sum(): part for part in (record.trained, record.evaluated)}.items())
    if not known:
        return
    contents = hash_names(sample_digests([split]))
    if not _has_part(before, ids):
        change = "other images, or another order of them,"
    elif changed := np.count_nonzero(~np.isin(contents, record.contents)):
        change = f"other content in {changed} of {len(contents)} images that were compared"
    else:
        return
    logging.getLogger(__name__).warning(
        f"split {split.name} has {change} than when {folder} was trained, so results on it are not comparable"
    )


def _has_part(whole: np.ndarray, part: np.ndarray) -> bool:
    """Return whether all values of `part` follow each other somewhere in `whole`."""
    starts = np.flatnonzero(whole == part[0])
    return any(np.array_equal(whole[start : start + len(part)], part) for start in starts)


def warn_of_leak(folder: RunFolder, split: str, ids: Sequence[str]) -> None:
    """Log a warning if the values of a run were trained on images of a split, see `describe_leak`."""
    record = read_image_record(folder)
    if record is not None and (leak := describe_leak(record, folder, split, ids)):
        logging.getLogger(__name__).warning(leak)


def _from_arrays(stored: dict[str, np.ndarray]) -> ImageRecord:
    record = ImageRecord(*(stored[field.name] for field in fields(ImageRecord)))
    if any(array.dtype != np.uint64 or array.ndim != 1 for array in asdict(record).values()):
        raise ValueError("its arrays should be lists of 64-bit numbers")
    return record
