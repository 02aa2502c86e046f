"""Data sets of TensorFlow Datasets by name, such as `tfds:coco/2014`, read without TensorFlow.

Prepare a data set as ArrayRecord, on a machine with TensorFlow, below `data.root` (by default TFDS's own folder,
~/tensorflow_datasets or $TFDS_DATA_DIR):

    tfds build coco/2014 --file_format=array_record --data_dir=ROOT

A name may have a configuration and a version, such as `voc/2007:5.0.0`; without them, the default configuration and the
newest prepared version are used. Splits are the data set's own, or parts of them, such as `train[:90%]`.

Labels come from the first of these features: `labels` (a sequence of classes), `label` (one class or a sequence), or
`objects` with a `label` each. A single label of −1 means unknown. In VOC, labels in `labels` but not in
`labels_no_difficult` are difficult. Labels are stored within the records, so opening a split reads all records once.
`mlmoe pack` makes a copy with separate labels.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from mlmoe_jax.data.images import EncodedImages
from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.label_matrix import LabelMatrix
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained

try:
    import tensorflow_datasets as tfds
except ImportError as error:
    raise UserError(
        'data.name=tfds:… needs further packages; in the folder with pyproject.toml, run pip install -e ".[tfds]"'
    ) from error

RECORDS_AT_ONCE = 256
LABEL_FEATURES = ("labels", "label", "objects")  # `labels` first, because VOC marks difficult labels only there
ID_KEYS = ("image/filename", "file_name", "filename", "image/id", "image_id", "id")


@dataclass(eq=False)
class TfdsImages(EncodedImages):
    """The images of a TFDS data source, stored as encoded files in the feature `key`. Errors call the split `title`."""

    source: Any
    key: str
    title: str
    most_opened = 0  # to know about frames, all files would have to be read

    def __len__(self) -> int:
        return len(self.source)

    def name(self, row: int) -> str:
        return f"image {row} of {self.title}"

    def encoded(self, row: int) -> bytes:
        return self.source[row][self.key]


def open_tfds(data_config: ConfigDict, split: str) -> Split:
    """Open a split of a prepared TFDS data set. Images are in the order in which they are stored.

    `data.root` is TFDS's data_dir, or the folder of one version of one data set. "" means the default data_dir of TFDS.

    Raises:
      UserError: the data set is missing or not stored as ArrayRecord, the split is unknown, or records are damaged. Or
        the features contain no image or no labels.
    """
    name = data_config.name.removeprefix("tfds:")
    title = f"tfds:{name} split {split}"
    builder = _builder(epath.Path(data_config.root or tfds.core.constants.DATA_DIR).expanduser(), name)
    features = builder.info.features
    image_key = next((key for key in ("image", *features) if key in features and _is_image(features[key])), None)
    label_key = next((key for key in LABEL_FEATURES if key in features and _class_label(features[key])), None)
    if image_key is None or label_key is None:
        lacks = "no image" if image_key is None else f"no labels under {', '.join(LABEL_FEATURES)}"
        raise UserError(
            f"tfds:{name} has {lacks} among its features {', '.join(sorted(features))}; write its images and labels as "
            "files with a CSV and use data.name=csv"
        )
    source, label = _source(builder, name, split), _class_label(features[label_key])
    with damage_explained(title):
        labels, ids = _read(source, label_key, label.num_classes, features)
    if len(set(ids)) < len(labels):
        ids = [f"{split}/{row:08d}" for row in range(len(labels))]
    names = tuple(label.names or map(str, range(label.num_classes)))
    return Split(split, names, labels, ids, TfdsImages(source, image_key, title))


# ------------------------------------------------------------------------------------------------------ the builder
def _builder(root: epath.Path, name: str):
    """Return the read-only TFDS builder of the data set `name`, in its newest prepared version below `root`.

    Raises UserError if the data set is missing, damaged, another data set or not stored as ArrayRecord.
    """
    how = f"on a machine with TensorFlow run 'tfds build {name} --file_format=array_record'"
    with damage_explained(f"tfds:{name} in {root}"):  # TFDS raises various errors for damaged files
        try:
            if (root / "dataset_info.json").exists():
                builder = tfds.builder_from_directory(root)
            else:
                builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=root)
        except tfds.core.DatasetNotFoundError as error:
            raise UserError(
                f"tfds:{name} is not prepared in {root}, or has several configurations of which data.name should name "
                f"one; {how} and copy the folder to this machine"
            ) from error
        info = builder.info
        formats = {form.value for form in info.available_file_formats()}
    parts = {part for part in re.split("[/:]", name) if "*" not in part}  # a version may be 1.*.*
    if not parts.issubset(info.full_name.split("/")):
        raise UserError(f"{root} holds tfds:{info.full_name} and not tfds:{name}; correct data.root or data.name")
    if "array_record" not in formats:
        raise UserError(
            f"{builder.data_dir} is stored as {', '.join(sorted(formats))}, which only TensorFlow reads; {how} in "
            "another folder"
        )
    return builder


def _source(builder, name: str, split: str):
    features = builder.info.features
    skip = {key: tfds.decode.SkipDecoding() for key in features if _is_image(features[key])}
    try:
        source = builder.as_data_source(split, decoders=skip)
        len(source)  # raises for a part such as train[5:2]
    except ValueError as error:
        raise UserError(
            f"tfds:{name} has no split '{split}'; it has {', '.join(builder.info.splits)}, and parts of these such as "
            "train[:50%]"
        ) from error
    return source


# ----------------------------------------------------------------------------------------------------- the features
def _is_image(feature) -> bool:
    return isinstance(feature, tfds.features.Image)


def _class_label(feature):
    """Return the ClassLabel feature in a feature; None if there is none.

    The feature may be a ClassLabel, a sequence of them, or a sequence of objects with a feature `label`.
    """
    if isinstance(feature, tfds.features.Sequence):
        feature = feature.feature
    if isinstance(feature, tfds.features.FeaturesDict) and "label" in feature:
        feature = feature["label"]
    return feature if isinstance(feature, tfds.features.ClassLabel) else None


def _read(source, label_key: str, count: int, features) -> tuple[LabelMatrix, list[str]]:
    """Return label codes i8[N,count] and ids of all N images of a data source. Without ids, the ids are []."""
    id_key = next((key for key in ID_KEYS if key in features and features[key].shape == ()), None)
    easy_key = "labels_no_difficult" if label_key == "labels" and "labels_no_difficult" in features else label_key
    parts, ids = [], []
    for start in range(0, max(1, len(source)), RECORDS_AT_ONCE):
        rows = range(start, min(start + RECORDS_AT_ONCE, len(source)))
        labels = np.full((len(rows), count), NEGATIVE, np.int8)
        for row, record in enumerate(source.__getitems__(list(rows))):
            value = record[label_key]
            if not isinstance(value, dict | list) and np.ndim(value) == 0 and value < 0:
                labels[row] = UNKNOWN
            else:
                labels[row, _classes(value)] = DIFFICULT
                labels[row, _classes(record[easy_key])] = POSITIVE
            if id_key:
                name = record[id_key]
                ids.append(name.decode(errors="replace") if isinstance(name, bytes) else str(name))
        parts.append(LabelMatrix.of(labels))
    return LabelMatrix.join(parts), ids


def _classes(value) -> np.ndarray:
    """Return the class indices i64[n] in the value of a feature that `_class_label` accepts."""
    value = value["label"] if isinstance(value, dict) else value
    return np.atleast_1d(np.asarray(value, np.int64))


TFDS = DataSource(open_tfds, drops_empty=True)
