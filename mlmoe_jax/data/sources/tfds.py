"""Data sets of TensorFlow Datasets by name, such as `tfds:coco/2014`, read without TensorFlow.

They must have been prepared as ArrayRecord, on a machine with TensorFlow, below `data.root` (or, if that is empty,
below TFDS's own folder, ~/tensorflow_datasets or $TFDS_DATA_DIR):

    tfds build coco/2014 --file_format=array_record --data_dir=ROOT

A name may have a configuration and a version, such as `voc/2007:5.0.0`; without them, the default configuration and the
newest prepared version are used. Splits are the data set's own, or parts of them, such as `train[:90%]`.

Labels are found by their features: `labels` (a sequence of classes), `label` (one or a sequence), or `objects` with a
`label` each. A single label of −1 means unknown. In VOC, labels in `labels` but not in `labels_no_difficult` are
difficult. Labels are stored within the records, so opening a split reads all of its records once; --mode=pack makes a
copy with separate labels.
"""

import os
import re

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from mlmoe_jax.data.images import EncodedImages
from mlmoe_jax.data.sources.source import Source, difficult_of
from mlmoe_jax.data.split import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN, Split, has_positive
from mlmoe_jax.errors import UserError

RECORDS_AT_ONCE = 256
LABELS = ("labels", "label", "objects")  # in this order: VOC marks difficult labels only beside `labels`
ID_KEYS = ("image/filename", "file_name", "filename", "image/id", "image_id", "id")


class TfdsImages(EncodedImages):
    """The images of a data source, stored encoded under the feature `key`."""

    def __init__(self, source, key: str, title: str):
        self.source, self.key, self.title = source, key, title

    def __len__(self) -> int:
        return len(self.source)

    def name(self, row: int) -> str:
        return f"image {row} of {self.title}"

    def encoded(self, row: int) -> bytes:
        return self.source[row][self.key]


def open_tfds(
    root: str | os.PathLike, name: str, split: str, *, keep_empty: bool = False, difficult: str = "negative"
) -> Split:
    """Open a split of the prepared data set `name`; images in their stored order, without those that have no label.

    root: TFDS's data_dir, or the folder of one version of one data set; empty means TFDS's default. keep_empty: keep
    images without a positive label. difficult: as for `open_voc`.
    Raises UserError for a data set that is missing or not in ArrayRecord, an unknown split, features without an image
    or labels, or records that cannot be read.
    """
    folder = epath.Path(root or tfds.core.constants.DATA_DIR).expanduser()
    builder = _builder(folder, name)
    features = builder.info.features
    image_key = next((key for key in ("image", *features) if key in features and _is_image(features[key])), None)
    label_key = next((key for key in LABELS if key in features and _class_label(features[key])), None)
    if image_key is None or label_key is None:
        raise UserError(
            f"tfds:{name} has {'no image' if image_key is None else 'no labels under ' + ', '.join(LABELS)} among its "
            f"features {', '.join(sorted(features))}; write its images and labels as files with a CSV and use "
            "data.name=csv"
        )
    source = _source(builder, name, split)
    classes = _class_names(_class_label(features[label_key]))
    labels, ids = _read(source, f"tfds:{name} split {split}", label_key, len(classes), features)
    images = TfdsImages(source, image_key, f"tfds:{name} split {split}")
    whole = Split(split, classes, labels, _ids(ids, split, len(labels)), images)
    rows = np.flatnonzero(has_positive(labels, difficult))
    if keep_empty or len(rows) == len(whole):
        return whole
    if not len(rows):
        raise UserError(
            f"no image of tfds:{name} split {split} has a positive label; set data.keep_empty or another split"
        )
    return whole.take(rows, name=split)


# ------------------------------------------------------------------------------------------------------ the builder
def _builder(root: epath.Path, name: str):
    """Return the read-only builder of a data set's newest version below `root`."""
    how = f"'tfds build {name} --file_format=array_record --data_dir={{}}'"
    try:
        if (root / "dataset_info.json").exists():
            builder = tfds.builder_from_directory(root)
        else:
            builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=root)
        info, folder = builder.info, builder.data_dir
        formats = {one.value for one in info.available_file_formats()}
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(
            f"tfds:{name} is not prepared in {root}, or has several configurations of which data.name should name one; "
            f"on a machine with TensorFlow run {how.format(root)} and copy the folder to this machine"
        ) from error
    except Exception as error:  # TFDS raises various errors for damaged files
        raise UserError(f"tfds:{name} in {root} is damaged ({_clause(error)}); prepare or copy it again") from error
    if info.name != re.split("[/:]", name)[0]:
        raise UserError(f"{root} holds tfds:{info.full_name} and not tfds:{name}; correct data.root or data.name")
    if "array_record" not in formats:
        raise UserError(
            f"{folder} is stored as {', '.join(sorted(formats)) or 'nothing known'}, which only TensorFlow reads; on a "
            f"machine that has it run {how.format('OTHER')} and set data.root to OTHER"
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
            f"tfds:{name} has no split '{split}' ({_clause(error)}); it has {', '.join(builder.info.splits)}, and "
            "parts of these such as train[:50%]"
        ) from error
    return source


# ----------------------------------------------------------------------------------------------------- the features
def _is_image(feature) -> bool:
    return isinstance(feature, tfds.features.Image)


def _class_label(feature):
    """Return the ClassLabel of a feature that is one, a sequence of them, or objects with a `label`; None otherwise."""
    if isinstance(feature, tfds.features.Sequence):
        feature = feature.feature
    if isinstance(feature, tfds.features.FeaturesDict) and "label" in feature:
        feature = feature["label"]
    return feature if isinstance(feature, tfds.features.ClassLabel) else None


def _class_names(label) -> tuple[str, ...]:
    return tuple(label.names or map(str, range(label.num_classes)))


def _read(source, title: str, label_key: str, count: int, features) -> tuple[np.ndarray, list[str]]:
    """Read labels i8[N,count] and, if a feature holds them, the ids of the N images."""
    id_key = next((key for key in ID_KEYS if key in features and features[key].shape == ()), None)
    easy_key = "labels_no_difficult" if label_key == "labels" and "labels_no_difficult" in features else label_key
    labels = np.full((len(source), count), NEGATIVE, np.int8)
    ids = []
    for start in range(0, len(source), RECORDS_AT_ONCE):
        rows = range(start, min(start + RECORDS_AT_ONCE, len(source)))
        try:
            records = source.__getitems__(list(rows))
        except Exception as error:  # ArrayRecord raises various errors for damaged files
            raise UserError(f"cannot read {title} ({_clause(error)}); prepare or copy the data set again") from error
        for row, record in zip(rows, records, strict=True):
            if _is_unknown(record[label_key]):
                labels[row] = UNKNOWN
            else:
                labels[row, _present(record[label_key])] = DIFFICULT
                labels[row, _present(record[easy_key])] = POSITIVE
        if id_key:
            ids += [_text(record[id_key]) for record in records]
    return labels, ids


def _is_unknown(value) -> bool:
    return not isinstance(value, dict | list) and np.ndim(value) == 0 and value < 0


def _present(value) -> np.ndarray:
    """Return the classes i64[n] of one label, a sequence of labels, or the objects of a record."""
    value = value["label"] if isinstance(value, dict) else value
    return np.atleast_1d(np.asarray(value, np.int64))


def _text(value) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _ids(stored: list[str], split: str, count: int) -> list[str]:
    return stored if len(set(stored)) == count else [f"{split}/{row:08d}" for row in range(count)]


def _clause(error: Exception) -> str:
    """Return the first sentence of an error, to be quoted in brackets."""
    return re.split(r"\. |\.?\n|\.$", str(error))[0][:200] or type(error).__name__


TFDS = Source(
    lambda data_config, split, classes: open_tfds(
        data_config.root,
        data_config.name.removeprefix("tfds:"),
        split,
        keep_empty=data_config.keep_empty,
        difficult=difficult_of(data_config, split),
    )
)
