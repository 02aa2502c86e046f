"""Check a data set (`--mode=data`): report its contents, and problems that would invalidate training or metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.duplicates import Duplicates, InspectedImages, duplicates, inspect
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.sources.open import open_splits, root_of
from mlmoe_jax.data.split import DIFFICULT, POSITIVE, UNKNOWN, Split
from mlmoe_jax.data.split_checks import EXAMPLES, check_splits, count_labels, label_warnings
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import text_table

SHOWN_CLASSES = 60  # in the text; JSON contains all
MOST_LABELS = 8  # rows of images by number of labels in the text; the last counts all larger numbers
SAME = {"id": "same id", "content": "same file content", "look": "similar appearance"}


# -------------------------------------------------------------------------------------------------------------- report
def print_checkup(config: ConfigDict, as_json: bool, sample: int = 0) -> int:
    """Check the data set of `config.data` and print the report; return 1 if there are problems, else 0."""
    report = check_up(config, sample)
    print(to_json(report, indent=2) if as_json else format_checkup(report))
    return 1 if report["problems"] else 0


def check_up(config: ConfigDict, sample: int = 0) -> dict[str, Any]:
    """Open every split that `config.data` names, decode its images, and return the report as a JSON-serializable dict.

    sample: decode at most this many images per split, evenly spaced; 0 = all.
    `problems` lists errors that have to be corrected, `warnings` notes about the data. Raises UserError if the training
    split cannot be opened or has no images, and for a negative `sample`.
    """
    if sample < 0:
        raise UserError(f"--sample={sample} should be a number of images per split, or 0 for all")
    splits, problems = _open_splits(config)
    rows = [np.linspace(0, len(split) - 1, min(len(split), sample or len(split))).astype(int) for split in splits]
    decoding, progress = Decoding.of(config.data), Progress("check", sum(map(len, rows)), 1)
    try:
        inspected = [inspect(split, some, progress.advance, decoding) for split, some in zip(splits, rows, strict=True)]
    finally:
        progress.close()
    if config.data.name == "packed":
        problems += _damaged_files(config.data.root)
    images = dict(zip([split.name for split in splits], inspected, strict=True))
    twice = duplicates(splits, inspected)
    return {
        "name": config.data.name,
        "root": root_of(config.data),
        "classes": list(splits[0].classes),
        "splits": {split.name: _describe(split, images[split.name]) for split in splits},
        "duplicates": [_entry(item) for item in twice],
        "problems": [
            *problems,
            *(sentence for split in splits for sentence in _bad_images(split, images[split.name].bad)),
            *(_sentence(item) for item in twice if _is_leak(item)),
        ],
        "warnings": [*label_warnings(splits[0]), *(_sentence(item) for item in twice if not _is_leak(item))],
    }


def _open_splits(config: ConfigDict) -> tuple[list[Split], list[str]]:
    """Return the splits that are usable, the training split first, and one sentence per split that is not."""
    data_config = config.data.copy_and_resolve_references()
    data_config.bad_images = "skip"  # missing images are counted here instead of raising when a split is opened
    names, errors = (data_config.val_split, *data_config.test_splits), []
    options = {"seed": config.seed, "keep_missing": True, "refused": errors.append}
    train, *others = open_splits(data_config, names, **options).values()
    check_splits(train, [])
    usable = [train]
    for split in others:
        try:
            check_splits(split, [])
            usable.append(split)
        except UserError as error:
            errors.append(error)
    return usable, list(map(str, errors))


def _describe(split: Split, images: InspectedImages) -> dict[str, Any]:
    labels_per_image = (split.labels == POSITIVE).sum(axis=1)
    bad = [
        {"id": split.ids[row], "missing": _is_missing(error), "why": str(error)} for row, error in images.bad.items()
    ]
    missing = sum(item["missing"] for item in bad)
    return {
        "images": len(split),
        "decoded": len(images.rows) + len(bad),
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


# ----------------------------------------------------------------------------------------------- problems as sentences
def _damaged_files(root: str) -> list[str]:
    """Compare the files of a packed data set with their checksums; return one sentence per damaged file."""
    from mlmoe_jax.data.sources import packed

    status(f"comparing the files in {root} with their checksums")
    return [sentence for sentence in packed.verify(root) if sentence]


def _bad_images(split: Split, bad: dict[int, BadImage]) -> list[str]:
    sentences = []
    for missing, what in ((True, "found"), (False, "read")):
        if errors := [str(error) for error in bad.values() if _is_missing(error) == missing]:
            listed = "; ".join(errors[:EXAMPLES]) + ("; …" if len(errors) > EXAMPLES else "")
            many = f"{len(errors):,} of the {len(split):,} images of split {split.name}"
            sentences.append(f"{many} cannot be {what}: {listed}")
    return sentences


def _is_leak(item: Duplicates) -> bool:
    """Return whether a model would be evaluated on images it was trained on; similar images are only a warning."""
    return item.first is not item.second and item.kind != "look"


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
    those = f"{item.images:,} of its {len(item.second):,} images"
    what = f"has {those} twice" if item.first is item.second else f"shares {those} with split {item.first.name}"
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
        these = slice(labels, None if more else labels + 1)
        shares = [(sum(split["images_by_labels"][these]), split["images"]) for split in columns]
        cells = [f"{count:,} ({100 * count / whole:.0f} %)" for count, whole in shares]
        rows.append([f"  images with {labels}{' or more' if more else ''}", *cells])
    return text_table([["", *splits], *rows])


def _class_table(classes: list[str], splits: dict[str, dict[str, Any]]) -> str:
    """Return one line per class, by decreasing frequency in the first split."""
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
        rows.insert(SHOWN_CLASSES // 2, [f"… {len(order) - len(shown):,} more (all with --json)", *[""] * len(columns)])
    return text_table([header, *rows])
