"""Check a data set (`--mode=data`): report its content, and problems that would invalidate training or metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.apps.tools.check_table import doubtful_labels, places, why_missing
from mlmoe_jax.data.images import STRICT, BadImage, Decoding, read_image
from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.open import open_split, root_of
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import (
    EXAMPLES,
    check_splits,
    contradictions,
    count_labels,
    examples,
    label_warnings,
    repeats,
    shared_groups,
)
from mlmoe_jax.errors import DONE, FOUND_PROBLEMS, UserError
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.machine import cores
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import text_table

SHOWN_CLASSES = 60  # classes in the text; JSON contains all classes
MOST_LABELS = 8  # rows of images by number of labels in the text; the last row counts all larger numbers
SIMILAR = "look"  # the kind in the JSON output
SAME = {"id": "same id", "content": "same file content", SIMILAR: "similar appearance"}
AT_ONCE = 1024  # images that are submitted to the pool

# Similar images have similar perceptual hashes, of the brightness on an 8×8 grid: a bit says whether a cell is darker
# than its right neighbor by more than STEP levels. Of 800 VOC photographs, 98 % differ in at most 3 of the 64 bits from
# a copy at 0.7 times the size and JPEG quality 75, and no two photographs differ in fewer than 6 bits.
GRID, STEP, CLOSE_BITS = 8, 2, 3
PLAIN_BITS = 6  # an image with fewer bits set, such as a blank image, cannot be compared
MOST_COMPARED = 200_000  # images of a split; comparing all pairs of more images would take minutes
# The fields of a readable image; `content` is a hash of the file, `hash` the perceptual hash.
_FIELDS = [("row", np.int64), ("width", np.int64), ("height", np.int64), ("content", np.uint64), ("hash", np.uint64)]


# -------------------------------------------------------------------------------------------------------------- report
def print_checkup(config: ConfigDict, as_json: bool, sample: int = 0) -> int:
    """Check the data set of `config.data` and print the report; return 1 if there are problems, else 0."""
    report = check_up(config, sample)
    print(to_json(report, indent=2) if as_json else format_checkup(report))
    return FOUND_PROBLEMS if report["problems"] else DONE


def check_up(config: ConfigDict, sample: int = 0) -> dict[str, Any]:
    """Open every split of `config.data`, decode its images, and return the report as a JSON-serializable dict.

    `problems` of the report lists errors that must be corrected, `warnings` has notes about the data.

    Args:
      sample: decode at most this many images per split, evenly spaced; 0 = all.

    Raises:
      UserError: the training split cannot be opened or is empty.
    """
    splits, problems = _open_splits(config)
    rows = [np.linspace(0, len(split) - 1, min(len(split), sample or len(split))).astype(int) for split in splits]
    decoding, progress = Decoding.of(config.data), Progress("check", sum(map(len, rows)), 1)
    try:
        inspected = [inspect(split, some, progress.advance, decoding) for split, some in zip(splits, rows, strict=True)]
    finally:
        progress.close()
    if config.data.name == "packed":
        problems += _damaged_files(config.data.root)
    has_cells = config.data.name == "csv" and config.data.label_column != ""
    twice = duplicates(splits, [images for images, _ in inspected])
    for split, (_, bad) in zip(splits, inspected, strict=True):
        problems += _bad_images(split, bad, config.data.root)
    return {
        "name": config.data.name,
        "root": root_of(config.data),
        "classes": list(splits[0].classes),
        "splits": {split.name: _describe(split, *images) for split, images in zip(splits, inspected, strict=True)},
        "duplicates": [_entry(item) for item in twice],
        "problems": [*problems, *(_sentence(item) for item in twice if _is_leak(item)), *shared_groups(splits)],
        "warnings": [
            *label_warnings(splits[0]),
            *contradictions(splits),
            *doubtful_labels(splits, config.data.separator if has_cells else ""),
            *(_sentence(item) for item in twice if not _is_leak(item)),
        ],
    }


def _open_splits(config: ConfigDict) -> tuple[list[Split], list[str]]:
    """Return the usable splits, the training split first, and a sentence about each unusable split."""
    data_config = config.data.copy_and_resolve_references()
    data_config.bad_images = "skip"  # missing images are counted here instead of raising when a split is opened
    options, errors = {"seed": config.seed, "keep_missing": True}, []
    train = open_split(data_config, data_config.train_split, **options)
    check_splits(train, [])
    usable = [train]
    for name in dict.fromkeys((data_config.val_split, *data_config.test_splits)):
        if name in ("", train.name):
            continue
        try:
            split = open_split(data_config, name, classes=train.classes, **options)
            check_splits(split, [])
            usable.append(split)
        except UserError as error:
            errors.append(str(error))
    return usable, errors


def _describe(split: Split, images: np.recarray, errors: dict[int, BadImage]) -> dict[str, Any]:
    labels_per_image = (split.labels == POSITIVE).sum(axis=1)
    bad = [{"id": split.ids[row], "missing": _is_missing(error), "why": str(error)} for row, error in errors.items()]
    missing = sum(item["missing"] for item in bad)
    return {
        "images": len(split),
        "groups": None if split.groups is None else len(np.unique(split.group_numbers)),
        "decoded": len(images) + len(bad),
        "missing": missing,
        "unreadable": len(bad) - missing,
        "bad": bad,
        "width": _range(images.width),
        "height": _range(images.height),
        "mean_labels": float(labels_per_image.mean()),
        "images_by_labels": np.bincount(labels_per_image).tolist(),
        "positive": count_labels(split, POSITIVE),
        "difficult": count_labels(split, DIFFICULT),
        "unknown": count_labels(split, UNKNOWN),
    }


def _range(sizes: np.ndarray) -> list[int] | None:
    return [int(sizes.min()), int(np.median(sizes)), int(sizes.max())] if len(sizes) else None


def _is_missing(error: BadImage) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


# ---------------------------------------------------------------------------------------------- pixels and duplicates
@dataclass(frozen=True)
class Duplicates:
    """Images of split `second` that are also in split `first`, or repeated images if both are one split.

    `kind` is id, content (equal files) or SIMILAR, and `pairs` has (row in first, row in second).
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
) -> tuple[np.recarray, dict[int, BadImage]]:
    """Decode the images i64[n] `rows` in one thread per core, calling `advance` after each.

    Returns _FIELDS of the readable images, and row -> error of the unreadable images.
    """

    def read(row: int) -> tuple[int, ...] | BadImage:
        try:
            data = split.images.encoded(row)
            pixels = read_image(data, name=split.ids[row], decoding=decoding)
        except BadImage as error:
            return error
        content = int.from_bytes(blake2b(data, digest_size=8).digest())
        return row, pixels.shape[1], pixels.shape[0], content, _perceptual_hash(pixels)

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
    return np.array(readable, _FIELDS).view(np.recarray), bad


def _perceptual_hash(pixels: np.ndarray) -> int:
    gray = Image.fromarray(pixels).convert("L").resize((GRID + 1, GRID), Image.Resampling.BOX)
    cells = np.asarray(gray, np.int16)
    return int.from_bytes(np.packbits(cells[:, 1:] - cells[:, :-1] > STEP).tobytes())


def alike(first: np.ndarray, second: np.ndarray, *, same: bool) -> list[tuple[int, int]]:
    """Return (i, j) for each u64[M] second[j] that differs in at most CLOSE_BITS bits from some u64[N] first[i].

    i is the first such row. With `same`, both are one split, in which only rows i < j count.
    """
    if max(len(first), len(second)) > MOST_COMPARED:
        status(f"similar images are not looked for among more than {MOST_COMPARED:,} images")
        return []
    pairs, clear = [], np.bitwise_count(first) >= PLAIN_BITS
    step = max(1, 2**23 // max(1, len(first)))  # 64 MB at a time
    for start in range(0, len(second) if len(first) else 0, step):
        hashes = second[start : start + step]
        close = (np.bitwise_count(hashes[:, None] ^ first) <= CLOSE_BITS) & clear
        if same:
            close &= np.arange(len(first)) < np.arange(start, start + len(hashes))[:, None]
        rows = np.flatnonzero(close.any(axis=1))
        pairs += zip(close[rows].argmax(axis=1).tolist(), (start + rows).tolist(), strict=True)
    return pairs


def duplicates(splits: Sequence[Split], inspected: Sequence[np.recarray]) -> list[Duplicates]:
    """Return the duplicates within each split and between every two splits.

    An image is reported once, for its id, its file content or its appearance, in this order.
    """
    results = []
    for a, b in itertools.combinations_with_replacement(range(len(splits)), 2):
        first, second = inspected[a], inspected[b]
        content = repeats(first.content.tolist(), second.content.tolist())
        similar = alike(first.hash, second.hash, same=a == b)
        content, similar = ([(int(first.row[i]), int(second.row[j])) for i, j in pairs] for pairs in (content, similar))
        reported: set[int] = set()
        for kind, pairs in (("id", repeats(splits[a].ids, splits[b].ids)), ("content", content), (SIMILAR, similar)):
            new = [(i, j) for i, j in pairs if j not in reported and (a, i) != (b, j)]
            reported |= {j for _, j in new}
            if new:
                results.append(Duplicates(kind, splits[a], splits[b], new))
    return results


# ----------------------------------------------------------------------------------------------- problems as sentences
def _damaged_files(root: str) -> list[str]:
    from mlmoe_jax.data.sources import packed

    status(f"comparing the files in {root} with their checksums")
    return [sentence for sentence in packed.verify(root) if sentence]


def _bad_images(split: Split, bad: dict[int, BadImage], root: str) -> list[str]:
    """Return sentences about images without a file, and about images that cannot be read."""
    missing = [row for row, error in bad.items() if _is_missing(error)]
    damaged = {row: str(error) for row, error in bad.items() if not _is_missing(error)}
    share, sentences = f"of the {len(split):,} images of split {split.name}", []
    if missing:
        what = why_missing([split.images.name(row) for row in missing], root)
        where = places((split, row) for row in missing)
        sentences.append(f"{len(missing):,} {share} cannot be found ({where}): {what}")
    if damaged:
        where = places((split, row) for row in damaged)
        sentences.append(f"{len(damaged):,} {share} cannot be read ({where}): {examples(damaged.values(), '; ')}")
    return sentences


def _is_leak(item: Duplicates) -> bool:
    """Return whether a model would be evaluated on training images; similar images are only a warning."""
    return item.first is not item.second and item.kind != SIMILAR


def _entry(item: Duplicates) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "splits": [item.first.name, item.second.name],
        "images": item.images,
        "other_labels": item.other_labels,
        "examples": [[item.first.ids[i], item.second.ids[j]] for i, j in item.pairs[:EXAMPLES]],
    }


def _sentence(item: Duplicates) -> str:
    i, j = item.pairs[0]
    images = f"{item.images:,} of its {len(item.second):,} images"
    what = f"has {images} twice" if item.first is item.second else f"shares {images} with split {item.first.name}"
    relabeled = f", {item.other_labels:,} of them with other labels" if item.other_labels else ""
    return (
        f"split {item.second.name} {what} ({SAME[item.kind]}{relabeled}), such as {item.second.ids[j]} as "
        f"{item.first.ids[i]}"
    )


# ---------------------------------------------------------------------------------------------------------------- text
def format_checkup(report: dict[str, Any]) -> str:
    """Return the report as text."""
    where = f" in {report['root']}" if report["root"] else ""
    sentences = [f"{kind}: {one}" for kind in ("problem", "warning") for one in report[f"{kind}s"]]
    parts = [
        f"data set {report['name']}{where}: {len(report['classes']):,} classes",
        _split_table(report["splits"]),
        _class_table(report["classes"], report["splits"]),
        "\n".join(sentences) or "no problems found",
    ]
    return "\n\n".join(parts)


def _split_table(splits: dict[str, dict[str, Any]]) -> str:
    columns = splits.values()

    def counts(title: str, key: str) -> list[str]:
        return [title, *(f"{split[key]:,}" for split in columns)]

    rows = [counts("images", "images")]
    if all(split["groups"] for split in columns):
        rows.append(counts("  groups", "groups"))
    if any(split["decoded"] < split["images"] for split in columns):
        rows.append(counts("  decoded", "decoded"))
    rows += [counts("  missing", "missing"), counts("  unreadable", "unreadable")]
    for key in ("width", "height"):
        ranges = [" ".join(map(str, split[key] or "-")) for split in columns]
        rows.append([f"{key} in pixels: min, median, max", *ranges])
    rows.append(["labels per image, mean", *(f"{split['mean_labels']:.2f}" for split in columns)])
    longest = max(len(split["images_by_labels"]) for split in columns)
    for labels in range(min(longest, MOST_LABELS)):
        more = labels == MOST_LABELS - 1 and longest > MOST_LABELS
        counts_slice = slice(labels, None if more else labels + 1)
        shares = [(sum(split["images_by_labels"][counts_slice]), split["images"]) for split in columns]
        cells = [f"{count:,} ({100 * count / whole:.0f} %)" for count, whole in shares]
        rows.append([f"  images with {labels}{' or more' if more else ''}", *cells])
    return text_table([["", *splits], *rows])


def _class_table(classes: list[str], splits: dict[str, dict[str, Any]]) -> str:
    columns, header = [], ["class"]
    for name, split in splits.items():
        columns.append([f"{count:,}" for count in split["positive"]])
        columns.append([f"{100 * count / split['images']:.1f} %" for count in split["positive"]])
        header += [name, ""]
        for key in ("difficult", "unknown"):
            if any(split[key]):
                columns.append([f"{count:,}" for count in split[key]])
                header.append(key)
    order = np.argsort(-np.array(next(iter(splits.values()))["positive"]), kind="stable").tolist()
    if (more := len(order) - SHOWN_CLASSES) > 0:
        order = order[: SHOWN_CLASSES // 2] + order[-SHOWN_CLASSES // 2 :]
    rows = [[classes[k], *(column[k] for column in columns)] for k in order]
    if more > 0:
        rows.insert(SHOWN_CLASSES // 2, [f"… {more:,} more (all with --json)", *[""] * len(columns)])
    return text_table([header, *rows])
