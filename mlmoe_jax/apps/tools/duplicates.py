"""Inspect the pixels of a data set: images that are missing or unreadable, their sizes, and duplicates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from PIL import Image

from mlmoe_jax.data.images import STRICT, BadImage, Decoding, read_image
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import repeats
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import status

AT_ONCE = 1024  # images that are submitted to the pool

# Similar images are recognized by their brightness on an 8×8 grid: a bit says whether a cell is darker than its right
# neighbor by more than STEP levels. Of 800 VOC photographs, 98 % differ in at most 3 of the 64 bits from their own
# copies at 0.7 times the size and JPEG quality 75, and no two of the photographs differ in fewer than 6.
GRID, STEP, CLOSE_BITS = 8, 2, 3
PLAIN_BITS = 6  # an image with fewer bits set, such as a blank one, cannot be compared
MOST_COMPARED = 200_000  # images of a split; comparing every two of more would take minutes


@dataclass(frozen=True)
class InspectedImages:
    """The results of decoding some images of a split; the arrays are about the n that could be read.

    rows: i64[n] in the split. width, height: i64[n] in pixels. content: u64[n], equal for equal files. look: u64[n],
    close (see CLOSE_BITS) for images that look alike. bad: row -> the error of reading it.
    """

    rows: np.ndarray
    width: np.ndarray
    height: np.ndarray
    content: np.ndarray
    look: np.ndarray
    bad: dict[int, BadImage]


@dataclass(frozen=True)
class Duplicates:
    """Images of split `second` that are also in split `first`, or repeated images if both are the same split.

    kind: id, content (equal files) or look. pairs: (row in first, row in second).
    """

    kind: str
    first: Split
    second: Split
    pairs: list[tuple[int, int]]

    @property
    def images(self) -> int:
        """The number of images of `second`."""
        return len({j for _, j in self.pairs})

    @property
    def other_labels(self) -> int:
        """The number of pairs with different labels."""
        return sum(not np.array_equal(self.first.labels[i], self.second.labels[j]) for i, j in self.pairs)


def inspect(
    split: Split, rows: np.ndarray, advance: Callable[[], None], decoding: Decoding = STRICT
) -> InspectedImages:
    """Decode the images i64[n] `rows` in one thread per core, calling `advance` after each."""

    def read(row: int) -> tuple[int, ...] | BadImage:
        try:
            data = split.images.encoded(row)
            pixels = read_image(data, name=split.ids[row], decoding=decoding)
        except BadImage as error:
            return error
        content = int.from_bytes(blake2b(data, digest_size=8).digest())
        return row, pixels.shape[1], pixels.shape[0], content, _look(pixels)

    readable, bad = [], {}
    with ThreadPoolExecutor(cores()) as pool:
        for first in range(0, len(rows), AT_ONCE):
            chunk = rows[first : first + AT_ONCE].tolist()
            for row, result in zip(chunk, pool.map(read, chunk), strict=True):
                if isinstance(result, BadImage):
                    bad[row] = result
                else:
                    readable.append(result)
                advance()
    columns = np.array(readable, np.uint64).reshape(-1, 5).T
    return InspectedImages(*columns[:3].astype(np.int64), columns[3], columns[4], bad)


def _look(pixels: np.ndarray) -> int:
    gray = Image.fromarray(pixels).convert("L").resize((GRID + 1, GRID), Image.Resampling.BOX)
    cells = np.asarray(gray, np.int16)
    return int.from_bytes(np.packbits(cells[:, 1:] - cells[:, :-1] > STEP).tobytes())


def alike(first: np.ndarray, second: np.ndarray, *, same: bool) -> list[tuple[int, int]]:
    """Return (i, j) for each u64[M] second[j] that differs in at most CLOSE_BITS bits from some u64[N] first[i].

    i is the first such row. same: both are the same split, in which only rows i < j count.
    """
    if max(len(first), len(second)) > MOST_COMPARED:
        status(f"similar images are not looked for among more than {MOST_COMPARED:,} images")
        return []
    pairs, clear = [], np.bitwise_count(first) >= PLAIN_BITS
    step = max(1, 2**23 // max(1, len(first)))  # 64 MB at a time
    for start in range(0, len(second) if len(first) else 0, step):
        looks = second[start : start + step]
        close = (np.bitwise_count(looks[:, None] ^ first) <= CLOSE_BITS) & clear
        if same:
            close &= np.arange(len(first)) < np.arange(start, start + len(looks))[:, None]
        rows = np.flatnonzero(close.any(axis=1))
        pairs += zip(close[rows].argmax(axis=1).tolist(), (start + rows).tolist(), strict=True)
    return pairs


def duplicates(splits: Sequence[Split], inspected: Sequence[InspectedImages]) -> list[Duplicates]:
    """Return the duplicates within each split and between every two.

    An image with the same id is not reported again for its content, nor one with the same content for its look.
    """
    results = []
    for a, b in itertools.combinations_with_replacement(range(len(splits)), 2):
        first, second = inspected[a], inspected[b]
        content = repeats(first.content.tolist(), second.content.tolist())
        look = alike(first.look, second.look, same=a == b)
        content, look = ([(int(first.rows[i]), int(second.rows[j])) for i, j in pairs] for pairs in (content, look))
        seen: set[int] = set()
        for kind, pairs in (("id", repeats(splits[a].ids, splits[b].ids)), ("content", content), ("look", look)):
            new = [(i, j) for i, j in pairs if j not in seen and (a, i) != (b, j)]
            seen |= {j for _, j in new}
            if new:
                results.append(Duplicates(kind, splits[a], splits[b], new))
    return results
