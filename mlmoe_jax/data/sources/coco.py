"""COCO 2014 as a multi-label data set, and your own images with annotations in COCO's format.

`coco2014` reads the published layout:

    annotations/instances_{train,val}2014.json
    {train,val}2014/COCO_{train,val}2014_000000000009.jpg

A label is positive when an image has any annotation of its category, crowds included. Labels are in the order of the
file's `categories` (person, bicycle, car, …). 82,081 of the 82,783 training and 40,137 of the 40,504 validation images
have an annotation. Images without one are left out unless `keep_empty` is set.

`coco_json` reads your own images, with one file per split:

    annotations/{split}.json     # data.table, below data.root: images, annotations, categories, as COCO's instances
    images/…                     # data.images: the folder to which each file_name is relative; it can contain {split}

Without {split}, the key `split` of each image names its split. If no image has it, the file is the training split, from
which `data.val_fraction` can be held out. A class that is missing in the categories of another split is negative in
this split. Images without an annotation are kept, with all labels negative.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.names import first_repeated
from mlmoe_jax.data.sources.own_images import open_own_images
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, ImageRow, LabelRows, Listing, note_empty, select_split
from mlmoe_jax.data.sources.source import DataSource, Published
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import damage_explained, read_text

COCO_FILES = Published(
    "coco2014", "annotations, train2014 and val2014", "https://cocodataset.org/#download", "coco-2014"
)


def open_coco2014(data_config: ConfigDict, split: str) -> Split:
    """Open the split train or val. Image numbers are sorted as strings, as in the authors' code."""
    folder = COCO_FILES.folder(data_config.root)
    path = folder / "annotations" / f"instances_{split}2014.json"
    if not path.is_file():
        raise COCO_FILES.missing(f"there is no file {path}")
    with damage_explained(path):
        rows, categories = read_instances(path, f"{split}2014/")
        return select_split(rows, Listing(path, split, folder), categories)


def read_instances(path: Path, prefix: str = "") -> tuple[list[ImageRow], list[str]]:
    """Return the rows, sorted by their ids as strings, and the category names of a file in COCO's format.

    `prefix` is put before each file name.
    """
    content = json.loads(read_text(path))
    names = _by_id(content["categories"], "category", "name")
    files = _by_id(content["images"], "image", "file_name")
    labels: dict[Any, dict[str, int]] = {image: {} for image in files}
    for annotation in content["annotations"]:
        labels[annotation["image_id"]][names[annotation["category_id"]]] = POSITIVE
    splits = {image["id"]: image.get(SPLIT_COLUMN) for image in content["images"]}
    rows = [ImageRow(prefix + files[image], labels[image], split=splits[image]) for image in sorted(files, key=str)]
    return rows, list(names.values())


def _read_own(given: Listing) -> LabelRows:
    rows, categories = read_instances(given.path)
    note_empty(rows, given.usage)
    return rows, categories


def _by_id(items: list[dict], kind: str, key: str) -> dict[Any, Any]:
    """Return id -> `item[key]` for a list of items. If an id is repeated, raise ValueError, which names `kind`."""
    repeated = first_repeated(item["id"] for item in items)
    if repeated is not None:
        raise ValueError(f"it lists the {kind} id {repeated!r} twice")
    return {item["id"]: item[key] for item in items}


COCO2014 = DataSource(open_coco2014, splits=("train", "val"), drops_empty=True, labels=80, published=COCO_FILES)
COCO_JSON = DataSource(functools.partial(open_own_images, _read_own), reads_classes=True)
