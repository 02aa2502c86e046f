"""Images and labels in tar files (WebDataset): the members that share a stem are an example.

    train-000.tar       # or train/000.tar
      beach/001.jpg
      beach/001.json    # {"labels": ["sea", "sand"], "patient": "17"}

The stem is the path up to the first dot in the name of the file, and the rest is the field. `data.label_column` is a
key of the JSON objects, with one of the forms of labels that `parquet` lists, or a text field: `cls` has a name, or a
number of a class in `data.classes`, and `txt` and `labels` have names between commas or in lines. An example with
several images needs the field of one of them in `data.image_column`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from mlmoe_jax.data.containers.columns import IMAGE_COLUMN, infer_schema
from mlmoe_jax.data.containers.tar import count_unused, find_shards, image_members, index_shard, open_tar, read_index
from mlmoe_jax.data.sources.parquet import Container, open_container_split
from mlmoe_jax.data.sources.rows import LabelInput
from mlmoe_jax.data.sources.sidecar import split_tags
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained

_EXAMINED = 100  # examples of a shard, whose fields and keys are taken for its columns
_CELLS = {"cls": "", "txt": None}  # cls may be labels; a text that is not named as the labels may be a sentence


class _Example(NamedTuple):
    """The members of an example: the names of its images, and its texts by name."""

    images: list[str]
    texts: dict[str, bytes]


def _read_schema(given: LabelInput) -> tuple[pa.Schema, str] | None:
    """Return the fields of a shard and the keys of its JSON objects; None if it has no example."""
    count_unused(index_shard(given.path), os.path.basename(given.path), given.usage, texts=True)
    records = [_read_record(given, example) for example in itertools.islice(_read_examples(given), _EXAMINED)]
    cells: dict[str, Any] = {}
    for key, cell in itertools.chain.from_iterable(map(dict.items, records)):
        if cells.get(key) is None:
            cells[key] = _CELLS.get(key, cell)
    return (infer_schema(cells), "") if records else None


def _read_cells(given: LabelInput, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the texts of each image, and count examples without one; UserError if one has several."""
    field = given.config.image_column
    for example in _read_examples(given):
        images = [name for name in example.images if field in (IMAGE_COLUMN, _field(name))]
        if left := [name for name in example.images if name not in images]:
            given.usage.leave_out(f"not of the field {field}", left[0], len(left))
        if not images:
            given.usage.leave_out("without an image", f"{given.path}#{next(iter(example.texts or left))}")
            continue
        if len(images) > 1:
            raise UserError(
                f"{given.path} has an example with several images, {images[0]} and {images[1]}; set data.image_column "
                f"to the field of one, such as {_field(images[0])}, or rename them, without dots before the suffix"
            )
        yield images[0], dict.fromkeys(columns) | _read_record(given, example)


def _read_examples(given: LabelInput) -> Iterator[_Example]:
    """Yield the examples of a shard, in the order of their first members, which need not be side by side."""
    index = index_shard(given.path)
    table = read_index(index)
    names, texts = table["name"].to_pylist(), table["text"].to_pylist()
    images = {*image_members(index).tolist()}
    examples: dict[str, _Example] = {}
    for member, (name, text) in enumerate(zip(names, texts, strict=True)):
        example = examples.setdefault(name.removesuffix(_field(name)), _Example([], {}))
        if text is not None:
            example.texts[name] = text
        elif member in images:
            example.images.append(name)
    yield from filter(any, examples.values())


def _field(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2]


def _read_record(given: LabelInput, example: _Example) -> dict[str, Any]:
    """Return the texts of an example by field, and the keys of its JSON object; UserError if one is damaged."""
    record: dict[str, Any] = {}
    for name, content in example.texts.items():
        field = _field(name)
        with damage_explained(f"{given.path}#{name}"):
            text = content.decode("utf-8-sig").strip()
            if field.endswith("json"):
                record = {**json.loads(text), **record}
            elif field.endswith("cls"):
                record[field] = int(text) if re.fullmatch(r"-?\d+", text) else text
            else:
                record[field] = split_tags(text)
    return record


_CONTAINER = Container(
    kind="tar files",
    unit="file",
    find=find_shards,
    read_schema=_read_schema,
    read_cells=_read_cells,
    open_images=lambda folder, names, title, column: open_tar(folder, names, title),
)
WEBDATASET = DataSource(partial(open_container_split, _CONTAINER), reads_classes=True)
