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
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from mlmoe_jax.data.containers.columns import infer_type
from mlmoe_jax.data.containers.tar import (
    Shard,
    count_unused,
    find_shards,
    image_members,
    open_shard,
    open_tar,
    read_index,
)
from mlmoe_jax.data.sources.parquet import (
    Container,
    Plan,
    make_plan_row,
    open_container_split,
    plan_columns,
    stated_column,
)
from mlmoe_jax.data.sources.rows import ImageRow, LabelInput
from mlmoe_jax.data.sources.sidecar import split_tags
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained

_EXAMINED = 100  # examples of a shard, whose fields and keys are taken for its columns
_TYPES = {"cls": pa.string(), "txt": pa.null()}  # a text that is not named as the labels may be a sentence


class _Example(NamedTuple):
    """The members of an example: the names of its images, and its texts by name."""

    images: list[str]
    texts: dict[str, bytes]


def _plan_shard(name: str, split: str | None, given: LabelInput) -> Plan | None:
    """Return what to read from a shard; UserError if it is damaged, or it is not clear which field has the labels."""
    shard = _open(given)
    count_unused(shard, name, given.usage, texts=True)
    records = [_read_record(given.path, example) for example in itertools.islice(_read_examples(shard), _EXAMINED)]
    if not records:
        return None
    cells: dict[str, Any] = {}
    for key, cell in itertools.chain.from_iterable(map(dict.items, records)):
        if cells.get(key) is None:
            cells[key] = cell
    schema = pa.schema([(key, _TYPES.get(key) or infer_type(cell)) for key, cell in cells.items()])
    return plan_columns(schema, "", name, split, given)


def _open(given: LabelInput) -> Shard:
    return open_shard(f"{given.path}", f"{given.path}", stated_column(given.config))


def _read_rows(plan: Plan) -> Iterator[ImageRow]:
    """Yield a row for each example of a shard, and count those without an image; UserError if one has several."""
    for example in _read_examples(_open(plan.given)):
        if not example.images:
            plan.given.usage.leave_out("without an image", f"{plan.name}#{next(iter(example.texts))}")
            continue
        name, *others = example.images
        if others:
            raise UserError(
                f"{plan.given.path} has an example with several images, {name} and {others[0]}; set data.image_column "
                f"to the field of one, such as {_field(name)}, or rename them, without dots before the suffix"
            )
        cells = dict.fromkeys(plan.columns) | _read_record(plan.given.path, example)
        yield make_plan_row(plan, name, cells)


def _read_examples(shard: Shard) -> Iterator[_Example]:
    """Yield the examples of a shard, in the order of their first members, which need not be side by side."""
    table = read_index(shard.index)
    are_images = set(image_members(shard).tolist())
    examples: dict[str, _Example] = {}
    for member, (name, text) in enumerate(zip(table["name"].to_pylist(), table["text"].to_pylist(), strict=True)):
        if member not in are_images and text is None:
            continue
        stem = name.removesuffix(_field(name))
        example = examples.setdefault(stem, _Example([], {}))
        if text is None:
            example.images.append(name)
        else:
            example.texts[name] = text
    yield from examples.values()


def _field(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2]


def _read_record(path: PathLike, example: _Example) -> dict[str, Any]:
    """Return the texts of an example by field, and the keys of its JSON object; UserError if one is damaged."""
    record: dict[str, Any] = {}
    for name, content in example.texts.items():
        field = _field(name)
        with damage_explained(f"{path}#{name}"):
            text = content.decode("utf-8-sig").strip()
            if field.endswith("json"):
                record = {**json.loads(text), **record}
            elif field.endswith("cls"):
                record[field] = int(text) if re.fullmatch(r"-?\d+", text) else text
            else:
                record[field] = split_tags(text)
    return record


_CONTAINER = Container("tar files", "file", find_shards, _plan_shard, _read_rows, open_tar)
WEBDATASET = DataSource(partial(open_container_split, _CONTAINER), reads_classes=True)
