"""Find the columns of images and labels in a Parquet file, by types, names, and notes of the datasets library."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlmoe_jax.data.names import find_name, first_repeated
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike
from mlmoe_jax.runtime.text import abbreviate

if TYPE_CHECKING:
    import pyarrow as pa

# Types as `type_of` returns them
BYTES = r"binary|struct<(?=.*\bbytes: binary)(?=.*\bpath: )"  # or as the datasets library stores images
TEXT, NAMES = "string", r"list<\w+: string"
BOOLEAN, NUMBER = "bool", "bool|u?int|float|double|halffloat"
# Usual names, the most usual first. The first of images and of labels are defaults of config keys.
IMAGE_COLUMN, LABEL_COLUMN = "image", "labels"
_IMAGES = (IMAGE_COLUMN, "img", "images", "picture", "photo", "pixel_values", "jpg", "jpeg", "png", "webp")
_PATHS = ("file_name", "image", "image_path", "filename", "path", "filepath", "file", "image_file", "img_path")
_LABELS = (LABEL_COLUMN, "label", "tags", "tag", "classes", "class", "categories", "category", "genres", "genre", "cls")


def type_of(kind: pa.DataType) -> str:
    """Return a type as text, such as list<item: string>, whatever its encoding and the size of its offsets."""
    return re.sub(r"^dictionary<values=|large_|_view|fixed_size_", "", str(getattr(kind, "storage_type", kind)))


def find_columns(schema: pa.Schema, pattern: str, others: Collection[str | None] = ()) -> list[str]:
    """Return the columns whose `type_of` begins with a regular expression, except those in `others`."""
    return [item.name for item in schema if item.name not in others and re.match(pattern, type_of(item.type))]


def find_image_column(schema: pa.Schema, column: str, path: PathLike) -> str:
    """Return the column of the images in the schema of a file.

    It is `column`, in any case of letters. For "", or if IMAGE_COLUMN is missing, it is the only one that can be meant.
    Raises UserError if there is none, or several.
    """
    if repeated := first_repeated(schema.names):
        raise UserError(f"{path} has two columns '{repeated}'; rename one of them")
    in_bytes, texts = find_columns(schema, BYTES), find_columns(schema, TEXT)
    if found := find_name([*in_bytes, *texts], column):
        return found
    known = _likely_images(schema, in_bytes, texts) if column in ("", IMAGE_COLUMN) else ()
    if len(known) == 1:
        return known[0]
    named = f" '{column}'" if column else ""
    has = f"several columns of images: {abbreviate(known)}" if known else f"no column{named} of bytes or paths"
    columns = f"(columns: {abbreviate(schema.names)})"
    raise UserError(f"{path} has {has} {columns}; name it with --column, in a config with data.image_column")


def _likely_images(schema: pa.Schema, in_bytes: Sequence[str], texts: Sequence[str]) -> Sequence[str]:
    """Return the columns that may hold the images: those `in_bytes`, and of those with `texts` the usual paths."""
    features = read_features(schema)
    noted = [name for name in in_bytes if _kind(features.get(name)) == "Image"]
    paths = [found for name in _PATHS if (found := find_name(texts, name))][:1]
    known = noted or [*in_bytes, *paths] or [name for name in texts if name.endswith("_file_name")]
    return [name for name in _IMAGES if name in known][:1] or known


def find_label_column(schema: pa.Schema, others: Collection[str | None], path: PathLike) -> str:
    """Return the column LABEL_COLUMN, or the only column of labels in the schema of a file.

    It is "" if each class has a column of booleans. `others` are columns with other content. Raises UserError if there
    is none, or several.
    """
    names, features, texts = schema.names, read_features(schema), find_columns(schema, TEXT, others)
    if default := find_name(names, LABEL_COLUMN):
        return default
    noted = [name for name in names if name not in others and class_names(features.get(name))]
    lists = list(dict.fromkeys((*noted, *find_columns(schema, NAMES, others))))
    found = list(dict.fromkeys((*lists, *(name for name in texts if find_name(_LABELS, name)))))
    classes = find_columns(schema, BOOLEAN, others)
    if len(classes) > 1:
        found.append("")
    if len(found) == 1:
        return found[0]
    shown = [name or f"the columns of booleans {abbreviate(classes, 4)}" for name in found]
    has = f"several columns that may be the labels: {abbreviate(shown)}" if shown else "no column of labels"
    columns = f"(columns: {abbreviate(names)})"
    raise UserError(
        f"{path} has {has} {columns}; name it with data.label_column, which is empty for a column per class"
    )


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
    if isinstance(feature, list) and feature:  # a list of classes, as earlier libraries note it
        return class_names(feature[0])
    if _kind(feature) in ("Sequence", "List", "LargeList"):
        return class_names(feature.get("feature"))
    return feature.get("names") if _kind(feature) == "ClassLabel" else None


def _kind(feature: Any) -> str:
    return feature.get("_type", "") if isinstance(feature, dict) else ""


def infer_schema(records: Iterable[Mapping[str, Any]], known: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema of a file with some rows, each column -> cell.

    The first cell of a column that is not empty gives its type, unless `known` has the type. It is null for a cell with
    parts of several types.
    """
    import pyarrow as pa  # here, because --help does without it

    def infer(cell: Any) -> pa.DataType:
        try:
            return pa.scalar(cell).type
        except (pa.ArrowException, OverflowError):
            return pa.null()

    cells: dict[str, Any] = {}
    for name, cell in itertools.chain.from_iterable(map(dict.items, records)):
        if cells.get(name) in (None, "", [], {}):
            cells[name] = cell
    return pa.schema([(name, known[name] if name in known else infer(cell)) for name, cell in cells.items()])
