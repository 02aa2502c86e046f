"""Small Parquet files with images, in the layouts of the hub and of other programs."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

IMAGE = {"_type": "Image"}


def png(shade: int = 0) -> bytes:
    """Return an image whose color tells its number."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), (shade % 256, shade // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def images(count: int, start: int = 0) -> list[dict]:
    """Return cells of images as the datasets library stores them."""
    return [{"bytes": png(k), "path": f"{k}.png"} for k in range(start, start + count)]


def class_label(*names: str) -> dict:
    return {"names": list(names), "_type": "ClassLabel"}


def sequence(feature: dict) -> dict:
    return {"feature": feature, "_type": "Sequence"}


def notes(features: dict) -> dict[bytes, bytes]:
    """Return the metadata that the datasets library writes into a schema."""
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def write(path: Path, columns: dict, features: dict | None = None, **options) -> Path:
    """Write a Parquet file with these columns, and the notes of the datasets library about `features`."""
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata(notes(features))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def content(columns: dict, features: dict | None = None) -> bytes:
    """Return the content of such a file."""
    table = pa.table(columns)
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(notes(features)) if features else table, buffer)
    return buffer.getvalue()
