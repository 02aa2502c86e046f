"""Find the columns of a Parquet file: the one with the images, by its type, its name, and the datasets library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlmoe_jax.data.names import find_name, first_repeated
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.text import abbreviate

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_NAMES = ("image", "img", "images", "picture", "photo", "pixel_values", "jpg", "png", "webp")
PATH_NAMES = ("image", "file_name", "image_path", "filename", "path", "filepath", "file", "image_file", "img_path")


def read_features(schema: pa.Schema) -> Mapping[str, Any]:
    """Return the features that the datasets library has stored in a schema, by column; {} if there are none."""
    try:
        stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = stored["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def find_image_column(schema: pa.Schema, column: str, path: str) -> str:
    """Return the column of the images in the schema of a file.

    It is `column`, in any case of letters, or for "" the only one that can be it. Raises UserError if there is none, or
    several.
    """
    names = schema.names
    if repeated := first_repeated(names):
        raise UserError(f"{path} has two columns '{repeated}'; rename one of them")
    how = "name it with --column, in a config with data.image_column"
    if column:
        found = find_name(names, column)
        if found is None:
            raise UserError(f"{path} has no column '{column}' (columns: {abbreviate(names)}); {how}")
        if not (_holds_bytes(schema.field(found).type) or _holds_text(schema.field(found).type)):
            raise UserError(
                f"{path} has the column '{found}' of type {str(schema.field(found).type)[:80]}, which is neither bytes "
                f"nor paths of image files; {how}"
            )
        return found
    for names_of_kind, known in _candidates(schema):
        chosen = [name for name in known if name in names_of_kind][:1] or names_of_kind
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            raise UserError(f"{path} has several columns of images: {abbreviate(chosen)}; {how}")
    raise UserError(f"{path} has no column that is known to hold images (columns: {abbreviate(names)}); {how}")


def _candidates(schema: pa.Schema) -> list[tuple[list[str], tuple[str, ...]]]:
    """Return kinds of columns that may have the images, the surest first, and the usual names for each kind."""
    features = read_features(schema)
    declared = [name for name in schema.names if _kind(features.get(name)) == "Image"]
    in_bytes = [item.name for item in schema if _holds_bytes(item.type)]
    texts = [item.name for item in schema if _holds_text(item.type)]
    paths = [found for name in PATH_NAMES if (found := find_name(texts, name))]
    return [(declared, IMAGE_NAMES), (in_bytes, IMAGE_NAMES), (paths[:1], PATH_NAMES)]


def _kind(feature: Any) -> str:
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def _holds_bytes(kind: pa.DataType) -> bool:
    """Return whether cells are bytes, or a struct with bytes or paths, as the datasets library stores images."""
    import pyarrow.types as types

    kind = _plain(kind)
    if types.is_struct(kind):
        fields = {kind.field(k).name: _plain(kind.field(k).type) for k in range(kind.num_fields)}
        return {"bytes", "path"} <= fields.keys() and _is_binary(fields["bytes"])
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    checks = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(check(kind) for check in checks)


def _holds_text(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    kind = _plain(kind)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a dictionary or an extension."""
    while hasattr(kind, "storage_type") or (hasattr(kind, "value_type") and hasattr(kind, "index_type")):
        kind = kind.storage_type if hasattr(kind, "storage_type") else kind.value_type
    return kind
