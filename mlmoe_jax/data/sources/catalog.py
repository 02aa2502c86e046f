"""All data sets by name, with the config keys that each reads. A new data set is its file and its entry here.

This module imports no source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlmoe_jax.data.containers.columns import IMAGE_COLUMN, LABEL_COLUMN
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.runtime.keys import IntegerKey, PathKey, TextKey
from mlmoe_jax.runtime.registry import Registry, component

if TYPE_CHECKING:
    from mlmoe_jax.data.sources.source import DataSource

_IMAGES = PathKey("", "Folder of the images, below data.root; may contain {split}; if empty, data.root.")
_FILES = {
    "table": PathKey(
        "{split}.csv",
        "File (sidecar, wd_tagger, xmp: folder) of the labels, below data.root; may contain {split}.",
    ),
    "images": _IMAGES,
}
_CLASSES = {
    "classes": PathKey(
        "",
        "Text file below data.root, one class per line, or for label_studio the labeling configuration (.xml); if "
        "empty, the names in the table.",
    )
}
_COLUMNS = {
    "image_column": TextKey(IMAGE_COLUMN, "Column or key of the image's path; in parquet, of its path or content."),
    "label_column": TextKey(
        LABEL_COLUMN,
        "Column or key of the label names; if empty, a column per class has 1, 0, or nothing for unknown; for "
        "label_studio, name of the Choices.",
    ),
}
_GROUPS = {"group_column": TextKey("", "Column or key of the image's group, such as its patient; no group is divided.")}
_SEPARATOR = {"separator": TextKey(";", "Text between two label names.")}
_TABLE = {**_FILES, **_CLASSES, **_COLUMNS, **_GROUPS}
_LABELING_TOOL = "mlmoe_jax.data.sources.own_images:LABELING_TOOL"

# By the values of `config.data.name`
DATA_SETS: Registry[DataSource] = Registry(
    "data set",
    {
        "digits": "mlmoe_jax.data.sources.digits:SCENES_SOURCE",
        "digits_single": "mlmoe_jax.data.sources.digits:SINGLES_SOURCE",
        "synthetic": component(
            "mlmoe_jax.data.sources.synthetic:SYNTHETIC", labels=IntegerKey(20_000, "Number of labels.", above=0)
        ),
        "voc2007": "mlmoe_jax.data.sources.voc:VOC2007",
        "voc2012": "mlmoe_jax.data.sources.voc:VOC2012",
        "coco2014": "mlmoe_jax.data.sources.coco:COCO2014",
        "nuswide": "mlmoe_jax.data.sources.nuswide:NUSWIDE",
        "vg256": "mlmoe_jax.data.sources.visual_genome:VG256",
        "vg500": component("mlmoe_jax.data.sources.visual_genome:VG500", **_CLASSES),
        "chestxray14": "mlmoe_jax.data.sources.chest:CHESTXRAY14",
        "chexpert": "mlmoe_jax.data.sources.chest:CHEXPERT",
        "csv": component("mlmoe_jax.data.sources.tables:CSV", **_TABLE, **_SEPARATOR),
        "jsonl": component("mlmoe_jax.data.sources.tables:JSONL", **_TABLE),
        "parquet": component("mlmoe_jax.data.sources.parquet:PARQUET", **_CLASSES, **_COLUMNS, **_GROUPS, **_SEPARATOR),
        "webdataset": component(
            "mlmoe_jax.data.sources.webdataset:WEBDATASET", **_CLASSES, **_COLUMNS, **_GROUPS, **_SEPARATOR
        ),
        "folders": "mlmoe_jax.data.sources.folders:FOLDERS",
        "coco_json": component("mlmoe_jax.data.sources.coco:COCO_JSON", **_FILES),
        **{name: component(_LABELING_TOOL, **_FILES, **_CLASSES) for name in FORMATS},
        "label_studio": component(_LABELING_TOOL, **_FILES, **_CLASSES, **_COLUMNS),
        "keywords": component("mlmoe_jax.data.sources.keywords:KEYWORDS", images=_FILES["images"], **_CLASSES),
        "packed": "mlmoe_jax.data.sources.packed:PACKED_DATA",
        "tfds:NAME": "mlmoe_jax.data.sources.tfds:TFDS",
    },
)
