"""Your own images with their annotations in one COCO-style JSON file per split.

    annotations/{split}.json     # data.table, below data.root: images, annotations, categories, as COCO's instances
    images/…                     # data.images: the folder to which each file_name is relative; it can contain {split}

Without {split}, the only file is the whole training split, from which `data.val_fraction` can be held out. A label is
positive if an image has any annotation of its category. A class that the file of another split does not list as a
category is negative there.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import data_folder, image_files
from mlmoe_jax.data.sources.coco import read_instances, with_positive
from mlmoe_jax.data.sources.listed import ids_of, images_folder, refuse_other_splits, relative_to, table_path
from mlmoe_jax.data.sources.source import Source
from mlmoe_jax.data.split import NEGATIVE, POSITIVE, Split
from mlmoe_jax.errors import UserError


def open_coco_json(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of `data_config`, which is `config.data`; images sorted by their id as text, as in `coco2014`.

    classes: the names of the labels, in order; without them, the categories of the file.
    Images without any annotation are left out unless data.keep_empty is set.
    Raises UserError for a file that is missing or of another kind, annotations of an unknown class, a split without
    images, and, with data.bad_images=error, missing images.
    """
    folder = data_folder(data_config.root, "your images", f"the table {data_config.table}")
    path = table_path(folder, data_config.table, split)
    if "{split}" not in data_config.table:
        refuse_other_splits(path, split, data_config, "has no {split} in its name")
    names, files, labels = read_instances(path)
    if classes is not None:
        names, labels = tuple(classes), _by_classes(labels, names, classes, path)
    if not data_config.keep_empty:
        files, labels = with_positive(files, labels)
    if not files:
        raise UserError(f"no image of {path} has an annotation; check the file or set data.keep_empty")
    below = images_folder(folder, data_config.images, split)
    files = relative_to(below, files, path)
    images = image_files(below, files, check=data_config.bad_images == "error")
    return Split(split, names, labels, ids_of(files, data_config.images, split), images)


def _by_classes(labels: np.ndarray, names: Sequence[str], classes: Sequence[str], path: Path) -> np.ndarray:
    """Return i8[N,K] `labels` of the categories `names` in the order of `classes`."""
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


COCO_JSON = Source(open_coco_json)
