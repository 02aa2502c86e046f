"""Check a data set (`mlmoe data`): report its content, and problems that would invalidate training or metrics."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.check_table import doubtful_labels, image_places, name_sequences
from mlmoe_jax.apps.tools.duplicates import Inspection, find_duplicates, inspect_images
from mlmoe_jax.data.decoding import BadImage, Decoding
from mlmoe_jax.data.image_search import find_unlisted
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE, UNKNOWN
from mlmoe_jax.data.labels.hidden import hide_positives
from mlmoe_jax.data.sources.label_categories import read_categories
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.data.sources.named_files import OF_TABLES, find_root, resolve_path
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import (
    check_splits,
    contradictions,
    count_codes,
    doubtful_groups,
    label_warnings,
    list_usages,
    sample_images,
    shared_groups,
)
from mlmoe_jax.data.usage import join_usages, unused_input
from mlmoe_jax.errors import DONE, FOUND_PROBLEMS, UserError
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import abbreviate, percent, quantity
from mlmoe_jax.training.logistic.penalty_search import require_units
from mlmoe_jax.training.objective import require_labels, training_labels

Report = dict[str, Any]  # a part of the result of `check_data`
SHOWN_CLASSES = 60  # classes in the text; JSON contains all classes


# -------------------------------------------------------------------------------------------------------------- report
def check_data(config: ConfigDict, sample: int = 0) -> Report:
    """Open every split of `config.data`, decode its images, and return a report that can be written as JSON.

    At most `sample` images per split are decoded, evenly spaced; 0 = all. Raises UserError if a split cannot be opened,
    or has no positive label.

    Returns:
      `name` and `root` of the data set, `classes` (names), `splits` (name -> statistics), `duplicates` (images that are
        in the data set twice), `usage` (what was given, used and left out), `problems` (sentences about errors that
        must be corrected) and `warnings` (sentences about possible errors).
    """
    splits = _open_splits(config)
    inspections = _inspect_splits(splits, sample, Decoding.from_config(config.data))
    problems = _damaged_files(config.data.root) if config.data.name == "packed" else []
    for inspection in inspections:
        problems += _bad_images(inspection)
    problems += _training_problems(config, splits[0])
    duplicates = find_duplicates(inspections)
    usages = list_usages(splits)
    return {
        "name": config.data.name,
        "root": find_root(config.data),
        "classes": list(splits[0].classes),
        "splits": {inspection.split.name: _describe(inspection) for inspection in inspections},
        "duplicates": [item.document() for item in duplicates],
        "usage": [account.document() for account in join_usages(usages)],
        "problems": [*problems, *(item.sentence() for item in duplicates if item.is_leak), *shared_groups(splits)],
        "warnings": [
            *unused_input(usages),
            *(_unlisted_images(splits) if config.data.name in OF_TABLES else ()),
            *name_sequences(splits),
            *doubtful_groups(splits),
            *label_warnings(splits[0], splits[1:]),
            *contradictions(splits),
            *doubtful_labels(splits, _separator(config.data)),
            *(item.sentence() for item in duplicates if not item.is_leak),
        ],
    }


def _training_problems(config: ConfigDict, train_split: Split) -> list[str]:
    """Return the sentence with which a training by the config would refuse the training split; [] if it would not."""
    labels = training_labels(config, hide_positives(train_split, config.data).labels, tree=train_split.tree)
    try:
        require_labels(config, labels)
        if path := config.data.categories:
            read_categories(resolve_path(config.data, path), train_split.classes)
        if config.train.fit == "logistic":
            require_units(len(set(train_split.units)))
    except UserError as error:
        return [str(error)]
    return []


def _unlisted_images(splits: Sequence[Split]) -> list[str]:
    """Return a sentence about images in the folders of listed images that are in no split; [] without such images."""
    tables = [split for split in splits if any(account.unit in ("row", "image") for account in split.usage)]
    images = [split.images for split in tables if isinstance(split.images, ImageFiles)]
    unlisted = find_unlisted(files.name(row) for files in images for row in range(len(files)))
    count = quantity(len(unlisted), "image")
    return [f"in no split: {count} beside those that are in one ({abbreviate(unlisted, 3)})"] if unlisted else []


def _separator(data_config: ConfigDict) -> str | None:
    """Return the text between the names of labels, as in `doubtful_labels`."""
    if data_config.name in ("csv", "parquet", "webdataset"):
        return data_config.separator if data_config.label_column else None
    return "" if data_config.name in ("jsonl", "keywords", *FORMATS) else None


def _open_splits(config: ConfigDict) -> list[Split]:
    data_config = config.data.copy_and_resolve_references()
    data_config.bad_images = "skip"  # missing images are counted here instead of raising when a split is opened
    others = (data_config.val_split, *data_config.test_splits)
    splits = list(open_splits(data_config, others, seed=config.seed, keep_missing=True).values())
    for split in splits:
        check_splits(split, [])
        sample_images(split.images, f"split {split.name}", Decoding.from_config(data_config))
    return splits


def _inspect_splits(splits: Sequence[Split], sample: int, decoding: Decoding) -> list[Inspection]:
    chosen = [np.linspace(0, len(split) - 1, min(len(split), sample or len(split))).astype(int) for split in splits]
    with contextlib.closing(Progress("check", sum(map(len, chosen)), 1)) as progress:
        return [
            inspect_images(split, rows, progress.advance, decoding) for split, rows in zip(splits, chosen, strict=True)
        ]


def _describe(inspection: Inspection) -> Report:
    split, images, errors = inspection
    labels_per_image = split.labels.count(POSITIVE, axis=1)
    bad = [{"id": split.ids[row], "missing": _is_missing(error), "why": str(error)} for row, error in errors.items()]
    missing = sum(item["missing"] for item in bad)
    return {
        "images": len(split),
        "groups": None if split.groups is None else len(set(split.units)),
        "decoded": len(images) + len(bad),
        "missing": missing,
        "unreadable": len(bad) - missing,
        "bad": bad,
        "width": _range(images.width),
        "height": _range(images.height),
        "mean_labels": float(labels_per_image.mean()),
        "images_by_labels": np.bincount(labels_per_image).tolist(),
        "positive": count_codes(split, POSITIVE),
        "difficult": count_codes(split, DIFFICULT),
        "unknown": count_codes(split, UNKNOWN),
    }


def _range(sizes: np.ndarray) -> list[int] | None:
    """Return [minimum, median, maximum] of sizes; None if there are no sizes."""
    return [int(sizes.min()), int(np.median(sizes)), int(sizes.max())] if len(sizes) else None


def _is_missing(error: BadImage) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


# ----------------------------------------------------------------------------------------------- problems as sentences
def _damaged_files(root: str) -> list[str]:
    from mlmoe_jax.data.sources import packed

    status(f"comparing the files in {root} with their checksums")
    return [sentence for sentence in packed.verify(root) if sentence]


def _bad_images(inspection: Inspection) -> Iterator[str]:
    """Yield at most two sentences: about the images whose file is missing, and about the images that cannot be read."""
    split, _, errors = inspection
    missing = [row for row, error in errors.items() if _is_missing(error)]
    damaged = {row: str(error) for row, error in errors.items() if not _is_missing(error)}
    share = f"of the {len(split):,} images of split {split.name}"
    if missing:
        places = image_places((split, row) for row in missing)
        yield (
            f"{len(missing):,} {share} cannot be found ({places}): put {split.images.name(missing[0])} there, or "
            "correct data.root, data.images or the paths in the table"
        )
    if damaged:
        places = image_places((split, row) for row in damaged)
        yield f"{len(damaged):,} {share} cannot be read ({places}): {abbreviate([*damaged.values()], separator='; ')}"


# -------------------------------------------------------------------------------------------------------------- tables
def report_outcome(report: Report) -> Outcome:
    """Return the report of `check_data` as tables and sentences to print. The exit code is 1 if there are problems."""
    root = f" in {report['root']}" if report["root"] else ""
    sentences = [f"{kind}: {sentence}" for kind in ("problem", "warning") for sentence in report[f"{kind}s"]]
    parts = (
        f"data set {report['name']}{root}: {len(report['classes']):,} classes",
        _split_table(report["splits"]),
        _class_table(report["classes"], report["splits"]),
        _usage_table(report["usage"]),
        "\n".join(sentences) or "no problems found",
    )
    return Outcome(parts, report, FOUND_PROBLEMS if report["problems"] else DONE)


def _split_table(splits: dict[str, Report]) -> Table:
    """Return a table with one column per split, from name of a split -> its statistics."""
    titles = {
        "images": "images",
        "groups": "  groups",
        "decoded": "  decoded",
        "missing": "  missing",
        "unreadable": "  unreadable",
        "width": "width in pixels: min, median, max",
        "height": "height in pixels: min, median, max",
        "mean_labels": "labels per image, mean",
    }
    reports = splits.values()
    rows = [[title, *(split[key] for split in reports)] for key, title in titles.items()]
    rows.append(["  images without labels", *(split["images_by_labels"][0] for split in reports)])
    for key in ("difficult", "unknown"):
        rows.append([f"{key} labels", *(sum(split[key]) for split in reports)])
    return Table(["", *(Column(name, _value_text) for name in splits)], rows)


def _value_text(value: int | float | list[int]) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _usage_table(usage: Sequence[Report]) -> Table:
    """Return a table of the input that was given, used and left out, with one row per file or folder."""
    rows = [
        [
            f"{account['unit']}s of {account['place']}",
            account["given"],
            sum(account["used"].values()),
            account["merged"],
            sum(account["left_out"].values()),
        ]
        for account in usage
    ]
    return Table(["input", "given", "used", "merged", "left out"], rows)


def _class_table(classes: Sequence[str], splits: dict[str, Report]) -> Table:
    """Return a table of the number and share of images with each class, by decreasing frequency in the training split.

    If there are more than SHOWN_CLASSES classes, the rows in the middle are left out.
    """
    columns, values = ["class"], [classes]
    for name, split in splits.items():
        columns += [name, Column("%", percent)]
        values += [split["positive"], [count / split["images"] for count in split["positive"]]]
    positives = np.array(next(iter(splits.values()))["positive"])
    rows = [[column[k] for column in values] for k in np.argsort(-positives, kind="stable").tolist()]
    if (hidden := len(rows) - SHOWN_CLASSES) > 0:
        half = SHOWN_CLASSES // 2
        rows[half:-half] = [[f"… {hidden:,} more (all with --json)"]]
    return Table(columns, rows)
