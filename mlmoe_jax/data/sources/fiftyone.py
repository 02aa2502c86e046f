"""FiftyOne: labels.json of its FiftyOneImageClassificationDataset, with several labels per image.

    {"classes": ["sea", "sand"],
     "labels": {"beach/001": [0, {"label": 1, "confidence": 0.93, "attributes": {"difficult": true}}], "002": null}}

An image is named by its path in the folder of the images without suffix, or by its absolute path. Without `classes`,
labels are names. The label of an image may also stand alone, without a list; null is an image that is not labeled.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

from mlmoe_jax.data.image_search import list_images
from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile
from mlmoe_jax.data.sources.rows import ImageRow, LabelRows, Listing
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import read_text
from mlmoe_jax.runtime.storage import OutputTarget, open_output
from mlmoe_jax.runtime.text import compose


def _read(given: Listing) -> LabelRows:
    path, folder = given.path, given.folder
    content = json.loads(read_text(path))
    classes, labels = content.get("classes"), content["labels"]
    files: dict[str, str] = {}  # name without suffix -> file
    stems = set(map(compose, labels))
    for file in list_images(folder):
        stem = compose(os.path.splitext(file)[0])
        if stem in stems and files.setdefault(stem, file) != file:
            raise UserError(f"{path} names {stem}, which is {files[stem]} and {file} in {folder}; rename one of them")
    names = dict(enumerate(classes or ()))
    return (
        ImageRow(files.get(compose(name), name), _read_labels(value, names)) for name, value in labels.items()
    ), classes


def _read_labels(value: Any, names: dict[int, str]) -> dict[str, int] | None:
    """Return label -> code from the JSON value of an image; None if nobody has labeled it.

    `names` has the names of the labels that are given as numbers.
    """
    if value is None:
        return None
    codes = {}
    for item in value if isinstance(value, list) else [value]:
        given = item if isinstance(item, dict) else {"label": item}
        is_difficult = given.get("attributes", {}).get("difficult") is True
        codes[names.get(given["label"], given["label"])] = DIFFICULT if is_difficult else POSITIVE
    return codes


def _write(file: LabelFile, entries: Iterable[LabelEntry]) -> str:
    number = {name: k for k, name in enumerate(file.names)}
    labels = {}
    for entry in entries:
        is_absolute = os.path.isabs(entry.image)
        name = entry.image if is_absolute else os.path.normpath(os.path.splitext(entry.image)[0])
        labels[name] = _write_labels(entry, number)
    with open_output(OutputTarget(file.path, "json")) as output:
        json.dump({"classes": list(file.names), "labels": labels}, output, indent=1)
    return ""


def _write_labels(entry: LabelEntry, number: dict[str, int]) -> list | None:
    """Return the JSON value of an image, with `number[label]` for each label; None if nobody has labeled it."""
    if entry.labels is None:
        return None
    if entry.scores is not None:
        return [{"label": number[name], "confidence": round(entry.scores[name], 6)} for name in entry.labels]
    return [
        {"label": number[name], "attributes": {"difficult": True}} if code == DIFFICULT else number[name]
        for name, code in entry.labels.items()
    ]


FIFTYONE = Format(".json", _read, _write, require=LabelFile.require_stems, holds_difficult=True)
