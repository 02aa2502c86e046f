"""Tables of labels with small images, the settings of data sets, and what a split has."""

import json

import numpy as np
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import Split

CLASSES = ("a", "b", "c", "d")
SPREADSHEET = b"PK\3\4\x14\0\6\0\x08\0\0\0!\0"  # the start of an .xlsx file


def split_of(ids, labels=(1, 0, 0, 0), name="train", groups=None, classes=CLASSES) -> Split:
    """Return a split of black images; `labels` are codes of each image or of all."""
    classes = tuple(classes)
    codes = np.broadcast_to(np.array(labels, np.int8), (len(ids), len(classes)))
    return Split(name, classes, codes, list(ids), ArrayImages(np.zeros((len(ids), 4, 4, 3), np.uint8)), groups)


def data_settings(name, root="", **keys):
    """Return `config.data` for a data set."""
    data = default_config().data
    data.update({"name": name, "root": str(root), **keys})
    return data


def opened(name, root="", split="train", model_classes=None, **keys) -> Split:
    """Return a split of a data set, with these keys of `data`."""
    return open_split(data_settings(name, root, **keys), split, classes=model_classes)


def settings(root, **keys):
    return data_settings(**{"name": "csv", "root": root, **keys})


def write(folder, name, text, images=("a.png", "b.png", "sub/c.png")):
    """Write a table, whose text has {at} in place of the folder, and its images."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    content = text if isinstance(text, bytes) else text.replace("{at}", str(folder)).encode()
    (folder / name).write_bytes(content)
    write_images(folder, images)


def write_images(folder, images):
    """Write images; image k is k + 1 pixels wide."""
    for k, image in enumerate(images):
        path = folder / image
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (k + 1, 2)).save(path, "PNG")  # whatever its name is


def lines(*rows: dict) -> str:
    """Return rows as JSONL."""
    return "".join(json.dumps(row) + "\n" for row in rows)


MARK_OF_CODE = {POSITIVE: "", UNKNOWN: "?", DIFFICULT: "~"}


def listed(split) -> list[str]:
    """Return a line per image: its name and its positive, unknown (?) and difficult (~) labels."""
    assert split.labels[:].dtype == np.int8
    labels = [
        ", ".join(MARK_OF_CODE[code] + name for name, code in zip(split.classes, row, strict=True) if code != NEGATIVE)
        for row in split.labels[:].tolist()
    ]
    return [f"{name}: {names}".strip() for name, names in zip(split.ids, labels, strict=True)]


def widths(split) -> list[int]:
    """Return the widths of the images, by which `write_images` tells them apart."""
    return [split.images.read(row).shape[1] for row in range(len(split))]


class ImageTable(dict):
    """Stands in for a DataFrame: columns that know whether they have gaps, and an index."""

    index = "abc"

    class Column(list):
        def notna(self):
            return np.array([value is not None for value in self])

    def __init__(self, **columns):
        super().__init__({name: ImageTable.Column(values) for name, values in columns.items()})
