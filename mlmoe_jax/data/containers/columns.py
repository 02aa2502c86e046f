"""Find the columns of images and labels in a Parquet file, by types, names, and notes of the datasets library."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlmoe_jax.data.names import find_name, first_repeated
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.text import abbreviate

if TYPE_CHECKING:
    import pyarrow as pa

# Usual names, the most usual first
_IMAGES = ("image", "img", "images", "picture", "photo", "pixel_values", "jpg", "jpeg", "png", "webp")
_PATHS = ("image", "file_name", "image_path", "filename", "path", "filepath", "file", "image_file", "img_path")
_LABELS = ("labels", "label", "tags", "tag", "classes", "class", "categories", "category", "genres", "genre")
_CHOOSE_IMAGE = "name it with --column, in a config with data.image_column"


# --------------------------------------------------------------------------------------------------------------- images
def find_image_column(schema: pa.Schema, column: str, path: str) -> str:
    """Return the column of the images in the schema of a file.

    It is `column`, in any case of letters, or for "" the only one that can be it. Raises UserError if there is none, or
    several.
    """
    names = schema.names
    if repeated := first_repeated(names):
        raise UserError(f"{path} has two columns '{repeated}'; rename one of them")
    if column:
        found = find_name(names, column)
        if found is None:
            raise UserError(f"{path} has no column '{column}' (columns: {abbreviate(names)}); {_CHOOSE_IMAGE}")
        kind = schema.field(found).type
        if not (_holds_bytes(kind) or holds_text(kind)):
            wrong = f"the column '{found}' of type {str(kind)[:80]}, which is neither bytes nor paths of image files"
            raise UserError(f"{path} has {wrong}; {_CHOOSE_IMAGE}")
        return found
    for known in _image_candidates(schema):
        usual = [name for name in _IMAGES if name in known][:1] or known
        if len(usual) == 1:
            return usual[0]
        if usual:
            raise UserError(f"{path} has several columns of images: {abbreviate(usual)}; {_CHOOSE_IMAGE}")
    raise UserError(f"{path} has no column that holds images (columns: {abbreviate(names)}); {_CHOOSE_IMAGE}")


def _image_candidates(schema: pa.Schema) -> tuple[list[str], ...]:
    """Return the columns that may have the images: as noted in the schema, with bytes, and with paths."""
    features = read_features(schema)
    noted = [item.name for item in schema if _kind(features.get(item.name)) == "Image" and _holds_bytes(item.type)]
    in_bytes = [item.name for item in schema if _holds_bytes(item.type)]
    texts = [item.name for item in schema if holds_text(item.type)]
    paths = [found for name in _PATHS if (found := find_name(texts, name))]
    return noted, in_bytes, paths[:1]


def _holds_bytes(kind: pa.DataType) -> bool:
    """Return whether cells are bytes, or a struct with bytes or paths, as the datasets library stores images."""
    from pyarrow import types

    kind = _value_type(kind)
    if not types.is_struct(kind):
        return _is_binary(kind)
    fields = {kind.field(k).name: kind.field(k).type for k in range(kind.num_fields)}
    return {"bytes", "path"} <= fields.keys() and _is_binary(_value_type(fields["bytes"]))


def _is_binary(kind: pa.DataType) -> bool:
    from pyarrow import types

    checks = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(check(kind) for check in checks)


def holds_text(kind: pa.DataType) -> bool:
    """Return whether cells are texts."""
    from pyarrow import types

    kind = _value_type(kind)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values if they are stored as a dictionary or as an extension type."""
    from pyarrow import types

    kind = getattr(kind, "storage_type", kind)
    return kind.value_type if types.is_dictionary(kind) else kind


# --------------------------------------------------------------------------------------------------------------- labels
def read_features(schema: pa.Schema) -> Mapping[str, Any]:
    """Return the features that the datasets library has noted in a schema, by column; {} if there are none."""
    try:
        notes = json.loads((schema.metadata or {})[b"huggingface"])
        features = notes["info" if "info" in notes else "dataset_info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _kind(feature: Any) -> str:
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def class_names(feature: Any) -> Sequence[str] | None:
    """Return the names of a feature of classes or of lists of classes; None for another feature."""
    while isinstance(feature, list) and len(feature) == 1:  # a list of classes, as earlier libraries note it
        feature = feature[0]
    if _kind(feature) in ("Sequence", "List", "LargeList"):
        return class_names(feature.get("feature"))
    return feature.get("names") if _kind(feature) == "ClassLabel" else None


def find_label_column(schema: pa.Schema, others: Collection[str], path: str) -> str:
    """Return the only column of labels in the schema of a file; "" if each class has a column of booleans.

    `others` are columns with other content. Raises UserError if there is none, or several.
    """
    features, items = read_features(schema), [item for item in schema if item.name not in others]
    found = [item.name for item in items if class_names(features.get(item.name)) or _is_list_of_names(item.type)]
    texts = [item.name for item in items if holds_text(item.type)]
    found = found or [name for name in _LABELS if name in texts][:1]
    usual = [name for name in _LABELS if name in found][:1] or found
    classes = boolean_columns(schema, others)
    how = "name it with data.label_column, which is empty for a column per class"
    if len(usual) == 1 and len(classes) < 2:
        return usual[0]
    if found:
        choice = [*found, *([f"the columns of booleans {abbreviate(classes, 4)}"] if len(classes) > 1 else [])]
        raise UserError(f"{path} has several columns that may be the labels: {abbreviate(choice)}; {how}")
    if len(classes) > 1:
        return ""
    raise UserError(f"{path} has no column that is known to hold labels (columns: {abbreviate(schema.names)}); {how}")


def _is_list_of_names(kind: pa.DataType) -> bool:
    from pyarrow import types

    checks = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(check(kind) for check in checks) and holds_text(kind.value_type)


def boolean_columns(schema: pa.Schema, others: Collection[str]) -> list[str]:
    """Return the columns of booleans that are not in `others`."""
    from pyarrow import types

    return [item.name for item in schema if types.is_boolean(item.type) and item.name not in others]


def number_columns(schema: pa.Schema, others: Collection[str]) -> list[str]:
    """Return the columns of booleans and numbers that are not in `others`."""
    from pyarrow import types

    checks = (types.is_boolean, types.is_integer, types.is_floating)
    return [item.name for item in schema if any(check(item.type) for check in checks) and item.name not in others]
