"""COCO 2014 as a multi-label data set, from the published layout.

    annotations/instances_{train,val}2014.json
    {train,val}2014/COCO_{train,val}2014_000000000009.jpg

A label is positive when an image has any annotation of its category, crowds included. Labels are in the order of the
file's `categories` (person, bicycle, car, …). 82,081 of the 82,783 training and 40,137 of the 40,504 validation images
have an annotation; the others are dropped unless `keep_empty` is set.
"""

import json
import os
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from mlmoe_jax.data.images import image_files
from mlmoe_jax.data.sources.published import Published
from mlmoe_jax.data.sources.source import Source, kept_and_checked
from mlmoe_jax.data.split import POSITIVE, Split, has_positive
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_DATA, damage_explained, read_bytes

SPLITS = ("train", "val")
PUBLISHED = Published(
    "coco2014", "annotations, train2014 and val2014", "https://cocodataset.org/#download", "coco-2014"
)


def open_coco(root: str | os.PathLike, split: str, *, keep_empty: bool = False, check: bool = True) -> Split:
    """Open train or val of COCO 2014; images sorted by number as text (the authors' order), ids relative to `root`.

    root: the folder that holds annotations, train2014 and val2014, or "", see `Published.folder`. keep_empty: keep
    images without any annotation.
    check: verify now that all images exist.
    Raises UserError for an unknown split, or annotations or images that are missing, malformed or empty.
    """
    if split not in SPLITS:
        raise UserError(f"data set coco2014 has no split '{split}'; it has {', '.join(SPLITS)}")
    folder = PUBLISHED.folder(root)
    source = folder / "annotations" / f"instances_{split}2014.json"
    if not source.is_file():
        raise PUBLISHED.wanted(f"there is no file {source}")
    classes, files, labels = read_instances(source)
    if not keep_empty:
        files, labels = with_positive(files, labels)
    if not files:
        raise UserError(f"no image of {source} has an annotation; check the file or set data.keep_empty")
    images = image_files(folder / f"{split}2014", files, check=check)
    return Split(split, classes, labels, [f"{split}2014/{file}" for file in files], images)


def with_positive(
    images: list[str], labels: np.ndarray, *, difficult: str = "negative"
) -> tuple[list[str], np.ndarray]:
    """Return those of the N images with labels i8[N,K] that have a positive label, and their labels.

    difficult: as in `has_positive`.
    """
    kept = has_positive(labels, difficult)
    return list(compress(images, kept)), labels[kept]


def read_instances(path: Path) -> tuple[tuple[str, ...], list[str], np.ndarray]:
    """Read an instances file: names of the K classes, files of the N images, labels i8[N,K].

    Raises UserError for a file that is missing, damaged, ambiguous, or of another kind.
    """
    with damage_explained(path):
        return _instances(_parse(path), path)


def _instances(content: Any, path: Path) -> tuple[tuple[str, ...], list[str], np.ndarray]:
    try:
        classes = tuple(category["name"] for category in content["categories"])
        class_ids = [category["id"] for category in content["categories"]]
        images = sorted(content["images"], key=lambda image: str(image["id"]))
        files, image_ids = [image["file_name"] for image in images], [image["id"] for image in images]
        of_image = [annotation["image_id"] for annotation in content["annotations"]]
        of_class = [annotation["category_id"] for annotation in content["annotations"]]
        _refuse_numbers(classes)
        _refuse_numbers(files)
        for what, values in (
            ("category", classes),
            ("category id", class_ids),
            ("image file", files),
            ("image id", image_ids),
        ):
            _refuse_twice(what, values, path)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a COCO instances file, whose images, annotations and categories have ids and names "
            f"({type(error).__name__}: {error}); download or export it again"
        ) from error
    labels = np.zeros((len(files), len(classes)), np.int8)
    labels[_places(of_image, image_ids, "images", path), _places(of_class, class_ids, "categories", path)] = POSITIVE
    return classes, files, labels


def _refuse_numbers(names: Sequence) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is not text")


def _refuse_twice(what: str, values: Sequence[Hashable], path: Path) -> None:
    if len(set(values)) != len(values):
        value, count = Counter(values).most_common(1)[0]
        raise UserError(f"{path} lists the {what} {value!r} {count} times, which is ambiguous; keep only one of them")


def _parse(path: Path):
    try:
        return json.loads(read_bytes(path, MOST_DATA))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a complete JSON file ({error}); download or export it again") from error


def _places(ids: list[Hashable], known: list[Hashable], what: str, path: Path) -> list[int]:
    place = {identifier: index for index, identifier in enumerate(known)}
    try:
        return [place[identifier] for identifier in ids]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} annotates {error}, which is not among its {what}; download or export it again"
        ) from error


COCO2014 = Source(
    lambda data_config, split, classes: open_coco(data_config.root, split, **kept_and_checked(data_config)),
    labels=lambda data_config: 80,
    published=PUBLISHED,
)
