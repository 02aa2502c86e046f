"""Find the columns of images and labels in a Parquet file, by types, names, and notes of the datasets library."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlmoe_jax.data.names import find_name, first_repeated
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.text import abbreviate

if TYPE_CHECKING:
    import pyarrow as pa

# Types as `type_of` returns them
BYTES = r"binary|struct<(?=.*\bbytes: binary)(?=.*\bpath: )"  # or as the datasets library stores images
TEXT, NAMES = "string", r"list<\w+: string"
BOOLEAN, NUMBER = "bool", "bool|u?int|float|double|halffloat"
# Usual names, the most usual first
_IMAGES = ("image", "img", "images", "picture", "photo", "pixel_values", "jpg", "jpeg", "png", "webp")
_PATHS = ("image", "file_name", "image_path", "filename", "path", "filepath", "file", "image_file", "img_path")
_LABELS = ("labels", "label", "tags", "tag", "classes", "class", "categories", "category", "genres", "genre", "cls")
_CHOOSE_IMAGE = "name it with --column, in a config with data.image_column"


def type_of(kind: pa.DataType) -> str:
    """Return a type as text, such as list<item: string>, whatever its encoding and the size of its offsets."""
    return re.sub(r"^dictionary<values=|large_|_view|fixed_size_", "", str(getattr(kind, "storage_type", kind)))


def find_columns(schema: pa.Schema, pattern: str, others: Collection[str | None] = ()) -> list[str]:
    """Return the columns whose `type_of` begins with a regular expression, except those in `others`."""
    return [item.name for item in schema if item.name not in others and re.match(pattern, type_of(item.type))]


def find_image_column(schema: pa.Schema, column: str, path: str) -> str:
    """Return the column of the images in the schema of a file.

    It is `column`, in any case of letters, or for "" the only one that can be it. Raises UserError if there is none, or
    several.
    """
    names = schema.names
    if repeated := first_repeated(names):
        raise UserError(f"{path} has two columns '{repeated}'; rename one of them")
    in_bytes, texts = find_columns(schema, BYTES), find_columns(schema, TEXT)
    if column:
        if found := find_name([*in_bytes, *texts], column):
            return found
        other = find_name(names, column)
        wrong = f"whose type {str(schema.field(other).type)[:80]} is neither bytes nor paths" if other else ""
        lacks = f"the column '{other}', {wrong}" if other else f"no column '{column}' (columns: {abbreviate(names)})"
        raise UserError(f"{path} has {lacks}; {_CHOOSE_IMAGE}")
    features = read_features(schema)
    noted = [name for name in in_bytes if _kind(features.get(name)) == "Image"]
    paths = [found for name in _PATHS if (found := find_name(texts, name))]
    for known in (noted, in_bytes, paths[:1]):
        usual = [name for name in _IMAGES if name in known][:1] or known
        if len(usual) == 1:
            return usual[0]
        if usual:
            raise UserError(f"{path} has several columns of images: {abbreviate(usual)}; {_CHOOSE_IMAGE}")
    raise UserError(f"{path} has no column that holds images (columns: {abbreviate(names)}); {_CHOOSE_IMAGE}")


def find_label_column(schema: pa.Schema, others: Collection[str | None], path: str) -> str:
    """Return the only column of labels in the schema of a file; "" if each class has a column of booleans.

    `others` are columns with other content. Raises UserError if there is none, or several.
    """
    features, texts = read_features(schema), find_columns(schema, TEXT, others)
    noted = [name for name in schema.names if name not in others and class_names(features.get(name))]
    found = list(dict.fromkeys((*noted, *find_columns(schema, NAMES, others))))
    found = found or [name for name in _LABELS if name in texts][:1]
    if len(found) > 1 and (usual := [name for name in _LABELS if name in found]):
        found = usual[:1]
    classes = find_columns(schema, BOOLEAN, others)
    if len(classes) > 1:
        found.append("")
    if len(found) == 1:
        return found[0]
    names = [name or f"the columns of booleans {abbreviate(classes, 4)}" for name in found]
    has = f"several columns that may be the labels: {abbreviate(names)}" if names else "no column of labels"
    columns = "" if names else f" (columns: {abbreviate(schema.names)})"
    raise UserError(f"{path} has {has}{columns}; name it with data.label_column, which is empty for a column per class")


def read_features(schema: pa.Schema) -> Mapping[str, Any]:
    """Return the features that the datasets library has noted in a schema, by column; {} if there are none."""
    try:
        notes = json.loads((schema.metadata or {})[b"huggingface"])
        features = notes["info" if "info" in notes else "dataset_info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def class_names(feature: Any) -> Sequence[str] | None:
    """Return the names of a feature of classes or of lists of classes; None for another feature."""
    while isinstance(feature, list) and len(feature) == 1:  # a list of classes, as earlier libraries note it
        feature = feature[0]
    if _kind(feature) in ("Sequence", "List", "LargeList"):
        return class_names(feature.get("feature"))
    return feature.get("names") if _kind(feature) == "ClassLabel" else None


def _kind(feature: Any) -> str:
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def infer_type(cell: Any) -> pa.DataType:
    """Return the type of a column with a cell; null if the cell has parts of several types."""
    import pyarrow as pa

    try:
        return pa.scalar(cell).type
    except (pa.ArrowException, OverflowError):
        return pa.null()
