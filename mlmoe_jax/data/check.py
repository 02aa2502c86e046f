"""A check-up of a data set (`--mode=data`): what is in it, and what would spoil a training or its figures.

`check_splits` is the part of it that every training goes through: labels and ids only, no pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from scipy.sparse import csr_array

from mlmoe_jax.data.duplicates import Duplicates, InspectedImages, duplicates, inspect, repeats
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.split import DIFFICULT, POSITIVE, UNKNOWN, Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.storage import to_json
from mlmoe_jax.runtime.text import text_table

TOP = 10  # co-occurrences, and pairs that never meet
EXAMPLES = 5  # of anything that is wrong
SHOWN_CLASSES = 60  # on a screen; JSON has them all
MOST_LABELS = 8  # images with more are counted together on a screen
SAME = {"id": "the same id", "content": "the same file content", "look": "the same look"}


# ------------------------------------------------------------------------------------------------ before each training
def check_splits(train: Split, others: Sequence[Split]) -> list[str]:
    """Look at labels and ids only; return warnings, one sentence each.

    others: the splits for validation and test; one of the same name as another is taken for the same.
    Raises UserError for a split without images and for images whose id is in two splits.
    """
    splits = list({split.name: split for split in (train, *others)}.values())
    for split in splits:
        if not len(split):
            raise UserError(f"split {split.name} has no images; check the data set or name another split")
        if not (split.labels == POSITIVE).any():
            raise UserError(
                f"no image of split {split.name} has a positive label, so that nothing can be learned or measured "
                "there; correct its labels, name another split, or hold out more with data.val_fraction"
            )
    ids = {split.name: set(split.ids) for split in splits}
    for first, second in itertools.combinations(splits, 2):
        if not ids[first.name].isdisjoint(ids[second.name]):
            shared = repeats(first.ids, second.ids)
            raise UserError(
                f"split {second.name} shares {len(shared):,} of its {len(second):,} images with split {first.name}, "
                f"the first is {second.ids[shared[0][1]]}; correct the lists or name other splits"
            )
    return _label_warnings(train)


def _label_warnings(train: Split) -> list[str]:
    without = [name for name, count in zip(train.classes, _count(train, POSITIVE), strict=True) if not count]
    if not without:
        return []
    listed = ", ".join(without[:EXAMPLES]) + (", …" if len(without) > EXAMPLES else "")
    return [
        f"split {train.name} has no positive image of {len(without):,} of its {len(train.classes):,} classes, which "
        f"cannot be learned: {listed}"
    ]


def _count(split: Split, value: int) -> list[int]:
    return (split.labels == value).sum(axis=0).tolist()


# ----------------------------------------------------------------------------------------------------------- check-up
def print_checkup(config: ConfigDict, as_json: bool, sample: int = 0) -> int:
    """Check the data set of `config.data` and print what was found; return 1 where something is wrong, else 0."""
    report = check_up(config, sample)
    print(to_json(report, indent=2) if as_json else format_checkup(report))
    return 1 if report["problems"] else 0


def check_up(config: ConfigDict, sample: int = 0) -> dict[str, Any]:
    """Open every split that `config.data` names, decode its images, and return all that was found, ready for JSON.

    sample: decode at most this many images of each split, evenly spread; 0 = all.
    `problems` lists what must be put right, `warnings` what one should know. Raises UserError where the training split
    does not open or has no images.
    """
    if sample < 0:
        raise UserError(f"--sample={sample} should be a number of images of each split, or 0 for all")
    splits, problems = _open_splits(config)
    rows = [_spread(len(split), sample) for split in splits]
    progress = Progress("check", sum(map(len, rows)), 1)
    try:
        pictures = [inspect(split, chosen, progress.advance) for split, chosen in zip(splits, rows, strict=True)]
    finally:
        progress.close()
    if config.data.name == "packed":
        problems += _damaged_files(config.data.root)
    twice = duplicates(splits, pictures)
    checked = list(zip(splits, pictures, strict=True))
    return {
        "name": config.data.name,
        "root": config.data.root,
        "classes": list(splits[0].classes),
        "splits": {split.name: _of_split(split, found) for split, found in checked},
        "cooccurrence": _together(splits[0]),
        "duplicates": [_entry(item) for item in twice],
        "problems": [
            *problems,
            *(sentence for split, found in checked for sentence in _bad_images(split, found)),
            *(_sentence(item) for item in twice if _is_leak(item)),
        ],
        "warnings": [*_label_warnings(splits[0]), *(_sentence(item) for item in twice if not _is_leak(item))],
    }


def _open_splits(config: ConfigDict) -> tuple[list[Split], list[str]]:
    """Return the splits that open and have images, the training split first, and sentences about those that do not."""
    data_config = config.data.copy_and_resolve_references()
    data_config.bad_images = "skip"  # missing images are counted here, where opening would stop at them
    names, errors = (data_config.val_split, *data_config.test_splits), []
    train, *others = open_splits(data_config, names, seed=config.seed, refused=errors.append).values()
    check_splits(train, [])
    sound = [train]
    for split in others:
        try:
            check_splits(split, [])
            sound.append(split)
        except UserError as error:
            errors.append(error)
    return sound, list(map(str, errors))


def _spread(images: int, sample: int) -> np.ndarray:
    return np.linspace(0, images - 1, min(images, sample or images)).astype(np.int64)


def _of_split(split: Split, found: InspectedImages) -> dict[str, Any]:
    labels_an_image = (split.labels == POSITIVE).sum(axis=1)
    bad = [{"id": split.ids[row], "missing": _is_missing(why), "why": str(why)} for row, why in found.bad.items()]
    return {
        "images": len(split),
        "decoded": len(found.rows) + len(bad),
        "missing": sum(item["missing"] for item in bad),
        "unreadable": sum(not item["missing"] for item in bad),
        "bad": bad,
        "width": _range(found.width),
        "height": _range(found.height),
        "mean_labels": float(labels_an_image.mean()),
        "images_by_labels": np.bincount(labels_an_image).tolist(),
        "positive": _count(split, POSITIVE),
        "difficult": _count(split, DIFFICULT),
        "unknown": _count(split, UNKNOWN),
    }


def _range(sizes: np.ndarray) -> list[int] | None:
    return [int(sizes.min()), int(np.median(sizes)), int(sizes.max())] if len(sizes) else None


def _is_missing(error: BadImage) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def _together(train: Split) -> dict[str, Any]:
    """Return the strongest p(b|a), and the pairs that never meet, first those that chance would bring together most."""
    counts, positives = cooccurrence(train.labels)
    met = counts.tocoo()
    # Two images of `a`, both with `b`, are little evidence of p = 1: rank as if five more had come without.
    rank = met.data / (positives[met.row] + 5)
    strongest = [(int(met.row[at]), int(met.col[at])) for at in np.argsort(-rank, kind="stable")[:TOP]]
    never, examples = _never_met(counts, positives)
    present, name = int(np.count_nonzero(positives)), train.classes
    return {
        "split": train.name,
        "strongest": [
            {
                "a": name[a],
                "b": name[b],
                "p": float(counts[a, b] / positives[a]),
                "images": int(counts[a, b]),
                "of": int(positives[a]),
            }
            for a, b in strongest
        ],
        "pairs": present * (present - 1) // 2,
        "never": never,
        "never_examples": [
            {"a": name[a], "b": name[b], "by_chance": float(product / len(train))} for product, a, b in examples
        ],
    }


def _never_met(counts: csr_array, positives: np.ndarray) -> tuple[int, list[tuple[int, int, int]]]:
    """Return how many pairs of labels that are there never meet, and of the TOP most frequent ones (product, a, b).

    product: of their positives. Of 20,000 labels all pairs would be gigabytes, so one label is looked at at a time.
    """
    never, best = 0, []
    for a in np.flatnonzero(positives):
        products = positives[a] * positives[a + 1 :]
        later = counts.indices[counts.indptr[a] : counts.indptr[a + 1]] - (a + 1)
        products[later[later >= 0]] = 0
        never += int(np.count_nonzero(products))
        candidates = np.flatnonzero(products > (best[-1][0] if len(best) == TOP else 0))
        of_row = candidates[np.argsort(-products[candidates], kind="stable")[:TOP]]
        best += [(int(products[b]), int(a), int(a + 1 + b)) for b in of_row]
        best = sorted(best, key=lambda pair: -pair[0])[:TOP]
    return never, best


def _entry(item: Duplicates) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "splits": [item.first.name, item.second.name],
        "images": item.images,
        "other_labels": item.other_labels,
        "examples": [[item.first.ids[i], item.second.ids[j]] for i, j in item.pairs[:EXAMPLES]],
    }


# ---------------------------------------------------------------------------------------------- what is wrong, in words
def _damaged_files(root: str) -> list[str]:
    """Compare the files of a packed data set with their checksums."""
    from mlmoe_jax.data.sources import packed

    splits = packed.read_manifest(root)[1]["splits"].values()
    files = sum(1 + len(split["shards"]) for split in splits)
    progress = Progress("verify", files, sum(split["images"] for split in splits) // files)
    wrong = []
    for sentence in packed.verify(root):
        wrong += [sentence] if sentence else []
        progress.advance()
    progress.close()
    return wrong


def _bad_images(split: Split, found: InspectedImages) -> list[str]:
    missing = [row for row, why in found.bad.items() if _is_missing(why)]
    unreadable = [row for row, why in found.bad.items() if not _is_missing(why)]
    sentences = []
    for rows, what in ((missing, "found"), (unreadable, "read")):
        if rows:
            listed = "; ".join(str(found.bad[row]) for row in rows[:EXAMPLES]) + ("; …" if len(rows) > EXAMPLES else "")
            many = f"{len(rows):,} of the {len(split):,} images of split {split.name}"
            sentences.append(f"{many} cannot be {what}: {listed}")
    return sentences


def _is_leak(item: Duplicates) -> bool:
    """Return whether a model would be tested on what it learned; a mere likeness is left to people to judge."""
    return item.first is not item.second and item.kind != "look"


def _sentence(item: Duplicates) -> str:
    i, j = item.pairs[0]
    those = f"{item.images:,} of its {len(item.second):,} images"
    what = f"has {those} twice" if item.first is item.second else f"shares {those} with split {item.first.name}"
    relabelled = f", {item.other_labels:,} of them with other labels" if item.other_labels else ""
    return (
        f"split {item.second.name} {what} ({SAME[item.kind]}{relabelled}), such as {item.second.ids[j]} as "
        f"{item.first.ids[i]}"
    )


# --------------------------------------------------------------------------------------------------------- on a screen
def format_checkup(report: dict[str, Any]) -> str:
    """Return the check-up as text for people."""
    where = f" in {report['root']}" if report["root"] else ""
    parts = [
        f"data set {report['name']}{where}: {len(report['classes']):,} classes",
        _split_table(report["splits"]),
        _class_table(report["classes"], report["splits"]),
        _pairs(report["cooccurrence"]),
        "\n".join(
            [f"problem: {sentence}" for sentence in report["problems"]]
            + [f"warning: {sentence}" for sentence in report["warnings"]]
        )
        or "nothing is wrong",
    ]
    return "\n\n".join(parts)


def _split_table(splits: dict[str, dict[str, Any]]) -> str:
    rows = [["images", *(f"{split['images']:,}" for split in splits.values())]]
    if any(split["decoded"] < split["images"] for split in splits.values()):
        rows.append(["  looked at", *(f"{split['decoded']:,}" for split in splits.values())])
    for key in ("missing", "unreadable"):
        rows.append([f"  {key}", *(f"{split[key]:,}" for split in splits.values())])
    for key in ("width", "height"):
        ranges = [split[key] for split in splits.values()]
        rows.append([f"{key}, pixels: least, median, most", *(" ".join(map(str, r)) if r else "-" for r in ranges)])
    rows.append(["labels an image, mean", *(f"{split['mean_labels']:.2f}" for split in splits.values())])
    longest = max(len(split["images_by_labels"]) for split in splits.values())
    for labels in range(min(longest, MOST_LABELS)):
        more = labels == MOST_LABELS - 1 and longest > MOST_LABELS
        these = slice(labels, None if more else labels + 1)
        cells = [_share(sum(split["images_by_labels"][these]), split["images"]) for split in splits.values()]
        rows.append([f"  images with {labels}{' or more' if more else ''}", *cells])
    return text_table([["", *splits], *rows])


def _share(count: int, whole: int) -> str:
    return f"{count:,} ({100 * count / whole:.0f} %)"


def _class_table(classes: list[str], splits: dict[str, dict[str, Any]]) -> str:
    """One line a class, the most frequent in the first split first."""
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
    shown = order if len(order) <= SHOWN_CLASSES else order[: SHOWN_CLASSES // 2] + order[-SHOWN_CLASSES // 2 :]
    rows = [[classes[k], *(column[k] for column in columns)] for k in shown]
    if len(shown) < len(order):
        rows.insert(SHOWN_CLASSES // 2, [f"… {len(order) - len(shown):,} more (--json has all)", *[""] * len(columns)])
    return text_table([header, *rows])


def _pairs(together: dict[str, Any]) -> str:
    rows = [
        [f"  p({pair['b']} | {pair['a']})", f"{pair['p']:.2f}", f"{pair['images']:,} of {pair['of']:,}"]
        for pair in together["strongest"]
    ]
    never = [[f"  {pair['a']}, {pair['b']}", f"{pair['by_chance']:.1f}"] for pair in together["never_examples"]]
    return "\n".join(
        [
            f"labels that come together most, in split {together['split']}",
            text_table(rows),
            "",
            f"{together['never']:,} of {together['pairs']:,} pairs of labels never meet there; the images in which "
            "chance alone would bring them together",
            text_table(never),
        ]
    )
