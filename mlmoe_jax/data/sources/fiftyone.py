"""FiftyOne: labels.json of its FiftyOneImageClassificationDataset, with several labels per image.

    {"classes": ["sea", "sand"],
     "labels": {"beach/001": [0, {"label": 1, "confidence": 0.93, "attributes": {"difficult": true}}], "002": null}}

An image is named by its path in the folder of the images without suffix, or by its absolute path. Without `classes`,
labels are names. The label of an image may also stand alone, without a list; null is an image that is not labeled.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE
from mlmoe_jax.data.sources.folders import image_names
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile
from mlmoe_jax.data.sources.rows import ImageRow
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_DATA, read_bytes
from mlmoe_jax.runtime.storage import OutputTarget, open_output


def _read(
    path: Path, data_config: ConfigDict, folder: Path, known_classes: Sequence[str] | None
) -> tuple[Iterator[ImageRow], Sequence[str] | None]:
    content = json.loads(read_bytes(path, MOST_DATA))
    classes, labels = content.get("classes"), content["labels"]
    files: dict[str, str] = {}
    for file in image_names(folder):
        if (stem := os.path.splitext(file)[0]) in labels and files.setdefault(stem, file) != file:
            raise UserError(f"{path} names {stem}, which is {files[stem]} and {file} in {folder}; rename one of them")
    names = dict(enumerate(classes or ()))
    return (_row(files.get(image, image), target, names) for image, target in labels.items()), classes


def _row(image: str, target: Any, names: dict[int, str]) -> ImageRow:
    if target is None:
        return ImageRow(image, None)
    codes = {}
    for item in target if isinstance(target, list) else [target]:
        label, attributes = (item["label"], item.get("attributes", {})) if isinstance(item, dict) else (item, {})
        codes[names.get(label, label)] = DIFFICULT if attributes.get("difficult") is True else POSITIVE
    return ImageRow(image, codes)


def _write(file: LabelFile, entries: Iterable[LabelEntry]) -> str:
    place = {name: k for k, name in enumerate(file.names)}
    with open_output(OutputTarget(file.path, "json")) as labels:
        before = f'{{"classes": {json.dumps(list(file.names))}, "labels": {{\n'
        for entry in entries:
            absolute = os.path.isabs(entry.image)
            name = entry.image if absolute else os.path.normpath(os.path.splitext(entry.image)[0])
            labels.write(f"{before}{json.dumps(name)}: {json.dumps(_target(entry, place))}")
            before = ",\n"
        labels.write(("" if before == ",\n" else before) + "\n}}\n")
    return ""


def _target(entry: LabelEntry, place: dict[str, int]) -> list | None:
    if entry.labels is None:
        return None
    if entry.scores is not None:
        return [{"label": place[name], "confidence": round(entry.scores[name], 6)} for name in entry.labels]
    return [
        {"label": place[name], "attributes": {"difficult": True}} if code == DIFFICULT else place[name]
        for name, code in entry.labels.items()
    ]


FIFTYONE = Format(".json", _read, _write, require=LabelFile.require_stems, holds_difficult=True)
