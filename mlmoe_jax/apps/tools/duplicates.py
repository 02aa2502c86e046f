"""Decode the images of splits, and find images that are in a data set twice, or are nearly equal (`data.twins`)."""

import errno
import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from mlmoe_jax.data.decoding import BadImage, Decoding, read_image
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.twins import HISTOGRAM_SHAPE, MOST_COMPARED, describe, similar_pairs
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import status

SIMILAR = "look"  # the kind in the JSON output
SAMENESS = {"id": "same id", "content": "same file content", SIMILAR: "similar appearance"}
EXAMPLES = 5  # pairs that are listed
IMAGES_PER_MAP = 1024  # images that are submitted to the threads at once

# The fields of a readable image; `content` is a hash of the file, `histogram` is from `twins.describe`.
_FIELDS = [("row", "i8"), ("width", "i8"), ("height", "i8"), ("content", "u8"), ("histogram", "f2", HISTOGRAM_SHAPE)]


class Inspection(NamedTuple):
    """The results of decoding the images of the split `split`.

    `images` has one record per readable image, with the fields _FIELDS. `errors` maps the row of each
    unreadable image to its error.
    """

    split: Split
    images: np.recarray
    errors: dict[int, BadImage]


def inspect_images(split: Split, rows: np.ndarray, advance: Callable[[], None], decoding: Decoding) -> Inspection:
    """Decode the images in `rows`, i64[n], in one thread per CPU core. `advance` is called after each image.

    Files that do not exist are not tried. More images than MOST_COMPARED are not described.
    """
    readable, errors = [], {}
    missing = set(split.images.missing().tolist())
    fields = _FIELDS if len(rows) <= MOST_COMPARED else _FIELDS[:-1]
    if fields != _FIELDS:
        status(f"similar images are not searched among more than {MOST_COMPARED:,} images")

    def inspect(row: int) -> tuple[Any, ...] | BadImage:
        return _missing_file(split.images.name(row)) if row in missing else _inspect_image(split, row, decoding, fields)

    with ThreadPoolExecutor(cores()) as pool:
        for start in range(0, len(rows), IMAGES_PER_MAP):
            chunk = rows[start : start + IMAGES_PER_MAP].tolist()
            for row, record in zip(chunk, pool.map(inspect, chunk), strict=True):
                if isinstance(record, BadImage):
                    errors[row] = record
                else:
                    readable.append(record)
                advance()
    return Inspection(split, np.array(readable, fields).view(np.recarray), errors)


def _missing_file(name: str) -> BadImage:
    error = BadImage(f"cannot read {name} as an image: {os.strerror(errno.ENOENT)}")
    error.__cause__ = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return error


def _inspect_image(split: Split, row: int, decoding: Decoding, fields: Sequence[Any]) -> tuple[Any, ...] | BadImage:
    try:
        data = split.images.encoded(row)
        pixels = read_image(data, name=split.ids[row], decoding=decoding)
    except BadImage as error:
        return error
    height, width = pixels.shape[:2]
    content = int.from_bytes(blake2b(data, digest_size=8).digest())
    record = row, width, height, content
    return (*record, describe(pixels)) if len(fields) > len(record) else record


@dataclass(frozen=True)
class Duplicates:
    """Images of the split `second` that are also in the split `first`. Both may be the same split.

    `kind` says what the images have in common, a key of SAMENESS. `pairs` are (row in `first`, row in `second`).
    """

    kind: str
    first: Split
    second: Split
    pairs: list[tuple[int, int]]

    @property
    def images(self) -> int:
        """The number of different images of `second` in `pairs`."""
        return len({j for _, j in self.pairs})

    @cached_property
    def other_labels(self) -> int:
        """The number of pairs whose two images have different labels."""
        count = 0
        for start in range(0, len(self.pairs), IMAGES_PER_MAP):
            first, second = map(list, zip(*self.pairs[start : start + IMAGES_PER_MAP], strict=True))
            count += np.count_nonzero((self.first.labels[first] != self.second.labels[second]).any(axis=1))
        return count

    @property
    def is_leak(self) -> bool:
        """Whether images are in two splits, such as training images in a test split. Similar images are not a leak."""
        return self.first is not self.second and self.kind != SIMILAR

    def document(self) -> dict[str, Any]:
        """Return the entry of the report: kind, names of the splits, numbers of images, and examples of ids."""
        return {
            "kind": self.kind,
            "splits": [self.first.name, self.second.name],
            "images": self.images,
            "other_labels": self.other_labels,
            "examples": [[self.first.ids[i], self.second.ids[j]] for i, j in self.pairs[:EXAMPLES]],
        }

    def sentence(self) -> str:
        i, j = self.pairs[0]
        images = f"{self.images:,} of its {len(self.second):,} images"
        if self.first is self.second:
            repetition = f"has {images} twice"
        else:
            repetition = f"shares {images} with split {self.first.name}"
        relabeled = f", {self.other_labels:,} of them with other labels" if self.other_labels else ""
        example = f"{self.second.ids[j]} as {self.first.ids[i]}"
        return f"split {self.second.name} {repetition} ({SAMENESS[self.kind]}{relabeled}), such as {example}"


def find_duplicates(inspections: Sequence[Inspection]) -> list[Duplicates]:
    """Return the duplicates within each split and between each two splits.

    For two splits, an image is reported for only one reason: an equal id, an equal file content, or a similar
    appearance, in this order of priority.
    """
    pairs = itertools.combinations_with_replacement(inspections, 2)
    return [duplicates for first, second in pairs for duplicates in _duplicates_of(first, second)]


def _duplicates_of(first: Inspection, second: Inspection) -> Iterable[Duplicates]:
    """Yield one `Duplicates` per kind for two splits, or for one split with itself."""
    same = first is second

    def split_rows(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return pairs of rows of the splits. `pairs` are pairs of positions in the lists of readable images."""
        return [(int(first.images.row[i]), int(second.images.row[j])) for i, j in pairs]

    pairs_by_kind = {
        "id": repeats(first.split.ids, second.split.ids),
        "content": split_rows(repeats(first.images.content.tolist(), second.images.content.tolist())),
    }
    if "histogram" in {*first.images.dtype.names} & {*second.images.dtype.names}:
        pairs_by_kind[SIMILAR] = split_rows(similar_pairs(first.images.histogram, second.images.histogram, same=same))
    reported: set[int] = set()
    for kind, pairs in pairs_by_kind.items():
        new = [(i, j) for i, j in pairs if j not in reported and not (same and i == j)]
        reported |= {j for _, j in new}
        if new:
            yield Duplicates(kind, first.split, second.split, new)


def repeats(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the pairs (i, j) with first[i] == second[j]. Each j is in at most one pair, with the smallest such i."""
    positions: dict[Hashable, int] = {}
    for i, value in enumerate(first):
        positions.setdefault(value, i)
    return [(positions[value], j) for j, value in enumerate(second) if value in positions]
