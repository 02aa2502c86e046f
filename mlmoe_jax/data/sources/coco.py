"""COCO 2014 as a multi-label data set, and your own images with annotations in COCO's format.

`coco2014` reads the published layout:

    annotations/instances_{train,val}2014.json
    {train,val}2014/COCO_{train,val}2014_000000000009.jpg

A label is positive when an image has any annotation of its category, crowds included. Labels are in the order of the
file's `categories` (person, bicycle, car, …). 82,081 of the 82,783 training and 40,137 of the 40,504 validation images
have an annotation. Images without one are dropped unless `keep_empty` is set.

`coco_json` reads your own images, with one file per split:

    annotations/{split}.json     # data.table, below data.root: images, annotations, categories, as COCO's instances
    images/…                     # data.images: the folder to which each file_name is relative; it can contain {split}

Without {split}, the only file is the whole training split, from which `data.val_fraction` can be held out. A class that
is missing in the categories of another split is negative in this split.
"""

import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.source import Published, Source, keep_labeled, require_split
from mlmoe_jax.data.sources.tables import listed_split, refuse_other_splits, table_path
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_DATA, damage_explained, read_bytes

PUBLISHED = Published(
    "coco2014", "annotations, train2014 and val2014", "https://cocodataset.org/#download", "coco-2014"
)


def open_coco(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open train or val of COCO 2014. Images are sorted by number as text, as in the authors' code."""
    require_split("coco2014", split, ("train", "val"))
    folder = PUBLISHED.folder(data_config.root)
    source = folder / "annotations" / f"instances_{split}2014.json"
    if not source.is_file():
        raise PUBLISHED.missing(f"there is no file {source}")
    classes, files, labels = read_instances(source)
    files, labels = keep_labeled(files, labels, data_config, lists=source)
    ids = [f"{split}2014/{file}" for file in files]
    return Split(split, classes, labels, ids, ImageFiles(folder, ids))


def open_coco_json(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of your own images, sorted by their id as text, as in `coco2014`.

    Images without any annotation are left out unless data.keep_empty is set.

    Raises:
      UserError: the file is missing or has another format, a class is unknown, or the split has no images.
    """
    path = table_path(data_config, split)
    if "{split}" not in data_config.table:
        refuse_other_splits(path, split, data_config, "has no {split} in its name")
    names, files, labels = read_instances(path)
    if classes is not None:
        names, labels = classes, _by_classes(labels, names, classes, path)
    files, labels = keep_labeled(files, labels, data_config, lists=path)
    return listed_split(data_config, split, names, labels, files, path)


def read_instances(path: Path) -> tuple[tuple[str, ...], list[str], np.ndarray]:
    """Read an instances file: names of the K classes, files of the N images, labels i8[N,K].

    Raises UserError for a file that is missing, damaged, ambiguous, or in another format.
    """
    with damage_explained(path):
        content = json.loads(read_bytes(path, MOST_DATA))
        categories, annotations = content["categories"], content["annotations"]
        images = sorted(content["images"], key=lambda image: str(image["id"]))
        classes = [category["name"] for category in categories]
        files = [image["file_name"] for image in images]
        for what, names in (("category", classes), ("image file", files)):
            _places(what, names)
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"the name of each {what} should be text")
        rows = _places("image id", (image["id"] for image in images))
        columns = _places("category id", (category["id"] for category in categories))
        marks = [(annotation["image_id"], annotation["category_id"]) for annotation in annotations]
        for image, category in marks:
            if image not in rows or category not in columns:
                raise ValueError(f"it annotates image {image} with category {category}, and lists only one of them")
        labels = np.zeros((len(files), len(classes)), np.int8)
        labels[[rows[image] for image, _ in marks], [columns[category] for _, category in marks]] = POSITIVE
        return tuple(classes), files, labels


def _places(what: str, values: Iterable[Hashable]) -> dict[Hashable, int]:
    """Return the position of each value; ValueError for a repeated value."""
    places: dict[Hashable, int] = {}
    for position, value in enumerate(values):
        if places.setdefault(value, position) != position:
            raise ValueError(f"it lists the {what} {value!r} twice")
    return places


def _by_classes(labels: np.ndarray, names: Sequence[str], classes: Sequence[str], path: Path) -> np.ndarray:
    """Return the labels i8[N,K] of the categories `names` in the order of `classes`."""
    place = {name: k for k, name in enumerate(classes)}
    ordered = np.full((len(labels), len(classes)), NEGATIVE, np.int8)
    for name, column in zip(names, labels.T, strict=True):
        if name in place:
            ordered[:, place[name]] = column
        elif (column == POSITIVE).any():
            raise UserError(
                f"{path} annotates the category '{name}', which is not a class of the training split; remove it "
                "or train with it"
            )
    return ordered


COCO2014 = Source(open_coco, labels=lambda data_config: 80, published=PUBLISHED)
COCO_JSON = Source(open_coco_json)
