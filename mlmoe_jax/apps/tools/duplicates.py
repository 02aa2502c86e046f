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

CHUNK = 16  # images per task of the pool

# Similar images are recognized by their brightness on an 8×8 grid: a bit says whether a cell is darker than its right
# neighbor by more than STEP levels. Of 800 VOC photographs, 98 % differ in at most 3 of the 64 bits from their own
# copies at 0.7 times the size and JPEG quality 75, and no two of the photographs differ in fewer than 6.
GRID, STEP, CLOSE_BITS = 8, 2, 3
PLAIN_BITS = 6  # an image with fewer bits set, such as a blank one, cannot be compared
CROWDED = 4096  # more images with the same quarter of the bits share a border or background, and are not compared


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

    def look_at(chunk: np.ndarray) -> list[tuple[int, int, int, int] | BadImage]:
        return [_inspect(split, row, decoding) for row in chunk.tolist()]

    found, bad = [], {}
    chunks = [rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK)]
    pool = ThreadPoolExecutor(cores())
    try:
        for chunk, results in zip(chunks, pool.map(look_at, chunks), strict=True):
            for row, result in zip(chunk.tolist(), results, strict=True):
                if isinstance(result, BadImage):
                    bad[row] = result
                else:
                    found.append((row, *result))
                advance()
    finally:
        pool.shutdown(cancel_futures=True)
    columns = np.array(found, np.uint64).reshape(-1, 5).T
    return InspectedImages(*columns[:3].astype(np.int64), columns[3], columns[4], bad)


def _inspect(split: Split, row: int, decoding: Decoding) -> tuple[int, int, int, int] | BadImage:
    try:
        data = split.images.encoded(row)
        pixels = read_image(data, name=split.ids[row], decoding=decoding)
    except BadImage as error:
        return error
    height, width = pixels.shape[:2]
    return width, height, int.from_bytes(blake2b(data, digest_size=8).digest()), _look(pixels)


def _look(pixels: np.ndarray) -> int:
    gray = Image.fromarray(pixels).convert("L").resize((GRID + 1, GRID), Image.Resampling.BOX)
    cells = np.asarray(gray, np.int16)
    return int.from_bytes(np.packbits(cells[:, 1:] - cells[:, :-1] > STEP).tobytes())


def alike(look: np.ndarray) -> np.ndarray:
    """Return the pairs i64[n,2], i < j, of u64[N] `look` that differ in at most CLOSE_BITS bits.

    Such a pair agrees in at least one of the four quarters of its bits, so only images that do are compared.
    """
    pairs = [np.zeros((0, 2), np.int64)]
    clear = np.flatnonzero(np.bitwise_count(look) >= PLAIN_BITS)
    for shift in (0, 16, 32, 48):
        quarter = (look[clear] >> np.uint64(shift)) & np.uint64(0xFFFF)
        _, inverse, counts = np.unique(quarter, return_inverse=True, return_counts=True)
        kept = counts[inverse] <= CROWDED
        order = clear[kept][np.argsort(quarter[kept], kind="stable")]
        quarter = np.sort(quarter[kept])
        at, step = np.arange(len(order)), 0
        while len(at):
            step += 1
            at = at[at + step < len(order)]
            at = at[quarter[at] == quarter[at + step]]
            close = at[np.bitwise_count(look[order[at]] ^ look[order[at + step]]) <= CLOSE_BITS]
            pairs.append(np.stack([order[close], order[close + step]], axis=1))
    return np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)


def duplicates(splits: Sequence[Split], inspected: Sequence[InspectedImages]) -> list[Duplicates]:
    """Return the duplicates within each split and between every two.

    An image found by its id is not reported again for its content, nor one found by its content for its look.
    """
    by_look = _alike_between(inspected)
    found = []
    for a, b in itertools.combinations_with_replacement(range(len(splits)), 2):
        content = repeats(inspected[a].content.tolist(), inspected[b].content.tolist())
        content = [(int(inspected[a].rows[i]), int(inspected[b].rows[j])) for i, j in content]
        seen: set[int] = set()
        for kind, pairs in (
            ("id", repeats(splits[a].ids, splits[b].ids)),
            ("content", content),
            ("look", by_look.get((a, b), [])),
        ):
            new = [(i, j) for i, j in pairs if j not in seen and (a, i) != (b, j)]
            seen |= {j for _, j in new}
            if new:
                found.append(Duplicates(kind, splits[a], splits[b], new))
    return found


def _alike_between(inspected: Sequence[InspectedImages]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return (split a, split b) -> (row in a, row in b) of images that look alike without being equal files."""
    owner = np.concatenate([np.full(len(found.rows), number) for number, found in enumerate(inspected)])
    columns = ([found.rows, found.content, found.look] for found in inspected)
    rows, content, look = map(np.concatenate, zip(*columns, strict=True))
    _, once = np.unique(content, return_index=True)  # a thousand equal files would make half a million pairs
    once.sort()
    between: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, j in once[alike(look[once])].tolist():
        between.setdefault((int(owner[i]), int(owner[j])), []).append((int(rows[i]), int(rows[j])))
    return between
