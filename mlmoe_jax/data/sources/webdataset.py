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

import os
import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mlmoe_jax.data.containers.columns import IMAGE_COLUMN, infer_schema
from mlmoe_jax.data.containers.stored import StoredImages
from mlmoe_jax.data.containers.tar import count_unused, find_shards, index_shard, open_tar, read_index
from mlmoe_jax.data.names import first_repeated
from mlmoe_jax.data.sources.parquet import LabeledFile, open_labeled_files
from mlmoe_jax.data.sources.sidecar import split_tags
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import read_object

# cls may be labels; a text that is not named as the labels may be a sentence
_TYPES = {"cls": pa.string(), "txt": pa.null()}

_Example = list[tuple[str, bytes | None]]  # the names of its members, and of texts the content


class Shard(LabeledFile):
    """A tar file whose members that share a stem are an example."""

    kind, unit = "tar files", "file"
    find = staticmethod(find_shards)

    @staticmethod
    def open_images(folder: str, names: Sequence[str], title: str, column: str) -> StoredImages:
        return open_tar(folder, names, title)

    def read_schema(self) -> tuple[pa.Schema | None, str]:
        """Return the fields of a shard and the keys of its JSON objects; None if it has no example."""
        count_unused(index_shard(self.path), os.path.basename(self.path), self.given.usage, texts=True)
        examples = self._read_examples()
        return infer_schema(map(self._read_record, examples), _TYPES) if examples else None, ""

    def read_cells(self, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the texts of each image, and count examples without one; UserError if one has several."""
        field, usage = self.given.config.image_column, self.given.usage
        for example in self._read_examples():
            found = [name for name, text in example if text is None]
            images = [name for name in found if field in (IMAGE_COLUMN, _field(name))]
            if len(images) < len(found):
                usage.leave_out(f"not of the field {field}", count=len(found) - len(images))
            if not images:
                usage.leave_out("without an image", f"{self.path}#{example[0][0]}")
                continue
            if repeated := first_repeated(images):
                raise UserError(f"{self.path} has two members {repeated}; rename one, and its labels, or remove it")
            if len(images) > 1:
                raise UserError(
                    f"{self.path} has an example with several images, {images[0]} and {images[1]}; set "
                    f"data.image_column to the field of one, such as {_field(images[0])}, or rename them, without dots "
                    "before the suffix"
                )
            yield images[0], dict.fromkeys(columns) | self._read_record(example)

    def _read_examples(self) -> Collection[_Example]:
        """Return the examples, in the order of their first members, which need not be side by side."""
        table = read_index(index_shard(self.path))
        used = table.filter(pc.is_null(table["unused"]))
        examples: dict[str, _Example] = {}
        for name, text in zip(used["name"].to_pylist(), used["text"].to_pylist(), strict=True):
            examples.setdefault(name.removesuffix(_field(name)), []).append((name, text))
        return examples.values()

    def _read_record(self, example: _Example) -> dict[str, Any]:
        """Return the texts of an example by field, and the keys of its JSON object; UserError if one is damaged."""
        record: dict[str, Any] = {}
        for name, content in example:
            if content is None:
                continue
            with damage_explained(f"{self.path}#{name}"):
                found = _parse_text(_field(name).lower(), content.decode("utf-8-sig").strip())
            for key, cell in found.items():
                if record.setdefault(key, cell) != cell:
                    raise UserError(f"{self.path}#{name} has another value of '{key}' than another member; correct one")
        return record


def _field(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2]


def _parse_text(field: str, text: str) -> dict[str, Any]:
    if field.endswith("json"):
        return read_object(text)
    if field.endswith("cls"):
        return {field: int(text) if re.fullmatch(r"-?\d+", text) else text}
    return {field: split_tags(text)}


WEBDATASET = DataSource(partial(open_labeled_files, Shard), reads_classes=True)
