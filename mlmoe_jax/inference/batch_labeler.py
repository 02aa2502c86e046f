"""Label the images of a table batch by batch, for engines that distribute it, such as Ray Data and Spark."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mlmoe_jax.config.loading import Overrides
from mlmoe_jax.data.decoding import STRICT, BadImage, Decoding
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import MixedImages
from mlmoe_jax.runtime.files import PathLike
from mlmoe_jax.runtime.text import abbreviate

if TYPE_CHECKING:
    from mlmoe_jax.inference.predictor import Predictor

# The types of columns, as Spark names them, and the columns that are added.
TEXT, TEXTS, NUMBERS = "STRING", "ARRAY<STRING>", "ARRAY<DOUBLE>"
ADDED = {"labels": TEXTS, "scores": NUMBERS, "error": TEXT}
Columns = Mapping[str, tuple[str, Sequence]]  # name -> (type, value of each row)
_opened: dict[str, Predictor] = {}  # the newest of this process, by `BatchLabeler.identity`


class BatchLabeler:
    """A function from a batch of a table with images to the batch with their labels.

    It holds only its arguments. The first batch in a process opens the model, which remains open there for all copies
    of this object: Spark makes a copy for each task. The model is compiled once, for `batch_size` images.

    Args:
      workdir, overrides, checkpoint: as in `Predictor.from_run`.
      column: the name of the column of images: paths, bytes of image files, arrays u8[h,w,3], Pillow images, or dicts
        with `bytes` or `path`, as of the datasets library.
      top_k: as in `Predictor.stream`.
      scores: whether to add the column of scores.
      batch_size: as in `Predictor.stream`, whatever the number of rows of a batch; None = LARGEST_BATCH per device.
      prefix: what the names of the added columns begin with.
    """

    def __init__(
        self,
        workdir: PathLike,
        *,
        column: str = "image",
        top_k: int | None = None,
        scores: bool = True,
        batch_size: int | None = None,
        prefix: str = "",
        overrides: Overrides = (),
        checkpoint: str = "best",
    ):
        self.workdir, self.overrides, self.checkpoint = os.fspath(workdir), overrides, checkpoint
        self.column, self.top_k, self.batch_size = column, top_k, batch_size
        self.added = {name: prefix + name for name in ADDED if scores or name != "scores"}
        self.identity = uuid.uuid4().hex

    @property
    def predictor(self) -> Predictor:
        """The predictor of this process. Raises UserError as `Predictor.from_run`, or if it assigns labels by ranks."""
        if self.identity not in _opened:
            from mlmoe_jax.inference.predictor import Predictor  # the process that distributes batches needs no JAX

            _opened.clear()  # before the next model is opened: memory need not hold both
            opened = Predictor.from_run(self.workdir, self.overrides, checkpoint=self.checkpoint)
            if opened.ranked:
                raise UserError(
                    f"{self.workdir} is not trained: it assigns labels by ranks among all images, and a batch has only "
                    'some; give overrides={"eval.threshold": …}, or fit thresholds (`mlmoe thresholds`)'
                )
            _opened[self.identity] = opened
        return _opened[self.identity]

    def __call__(self, batch: Any) -> Any:
        """Return a batch of the same type, with the labels of its images. Rows and other columns are not changed.

        In the result, the column of images has their paths, None for an image without one. The added columns are
          labels: the names of the labels of each image, as in `LabeledImage`.
          scores: f64[K] for each image, the probabilities in the order of `predictor.names`. For an unreadable image,
            they are None, in a dict NaN.
          error: the reason why the image could not be read; "" if it was read.

        Args:
          batch: a dict of lists or arrays, a pandas DataFrame, or a pyarrow Table or RecordBatch.

        Raises:
          UserError: as `predictor` and `Predictor.stream`; or the batch has another type, no column of images, or a
            column with the name of an added one.
        """
        library = "dict" if isinstance(batch, Mapping) else type(batch).__module__.partition(".")[0]
        if library not in _EXTEND:
            raise UserError(
                f"the batch is a {type(batch).__name__} and should be a dict, a pandas DataFrame or a pyarrow Table"
            )
        names = batch.column_names if library == "pyarrow" else list(batch)
        self._require_columns(names)
        cells = batch[self.column]
        if library == "pyarrow":
            cells = cells.to_pylist()
        elif library == "pandas":
            cells = cells.astype(object).where(cells.notna(), None)
        images = _Cells(cells)
        values = self._label(images)
        columns = {name: (ADDED[kind], values[kind]) for kind, name in self.added.items()}
        return _EXTEND[library](batch, {self.column: (TEXT, images.paths), **columns})

    def label_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over the results of batches: the function of Spark's `mapInPandas` and `mapInArrow`."""
        return map(self, batches)

    def spark_schema(self, columns: Iterable[tuple[str, str]]) -> str:
        """Return the schema of the result in the DDL of Spark.

        Args:
          columns: (name, type) of each column of the table, as the attribute `dtypes` of Spark's DataFrame.

        Raises:
          UserError: there is no column of images, or a column with the name of an added one.
        """
        types = dict(columns)
        self._require_columns(list(types))
        types[self.column] = TEXT
        types |= {name: ADDED[kind] for kind, name in self.added.items()}
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in types.items())

    def _require_columns(self, names: Sequence[str]) -> None:
        if self.column not in names:
            raise UserError(
                f"there is no column {self.column!r} with images, only {abbreviate(list(map(str, names)))}; give "
                "column=NAME"
            )
        if taken := [name for name in self.added.values() if name in names]:
            raise UserError(
                f"there is already a column {taken[0]!r}; give a prefix=TEXT for the added columns"
            )

    def _label(self, images: _Cells) -> dict[str, Sequence]:
        """Return the values of the added columns; the scores are NaN for an image that cannot be read."""
        from mlmoe_jax.inference.predictor import LARGEST_BATCH

        predictor = self.predictor
        size = self.batch_size or LARGEST_BATCH * predictor.run.mesh.size
        results = list(predictor.stream(images, batch_size=size, top_k=self.top_k))
        scores = np.full((len(results), len(predictor.names)), np.nan)
        for row, result in enumerate(results):
            if result.scores:
                scores[row] = list(result.scores.values())
        labels, errors = [list(result.labels) for result in results], [result.error for result in results]
        return {"labels": labels, "scores": scores, "error": errors}


class _Cells(MixedImages):
    """The images of the cells of a column, and their `paths`, None for an image without one."""

    def __init__(self, cells: Iterable[Any]):
        images, self.paths = [], []
        for cell in cells:
            of_file = cell if isinstance(cell, Mapping) else {"bytes": cell}
            path, content = of_file.get("path"), of_file.get("bytes")
            if isinstance(content, bytearray | memoryview):
                content = bytes(content)
            image = path if content is None else content
            images.append(image)
            self.paths.append(path or (image if isinstance(image, str) else None))
        super().__init__(images)

    def name(self, row: int) -> str:
        return self.paths[row] or "the image"

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray | Image.Image:
        if self.items[row] is None:
            raise BadImage("the row has no image")
        return super().open(row, decoding)


# ------------------------------------------------------------------------------------- batches with further columns
def _extend_dict(batch: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    arrays = {
        name: values if kind == NUMBERS else np.fromiter(values, object, len(values))
        for name, (kind, values) in columns.items()
    }
    return {**batch, **arrays}


def _extend_frame(batch: Any, columns: Columns) -> Any:
    return batch.assign(**{name: _cells(kind, values) for name, (kind, values) in columns.items()})


def _extend_arrow(batch: Any, columns: Columns) -> Any:
    import pyarrow

    text = pyarrow.string()
    types = {TEXT: text, TEXTS: pyarrow.list_(text), NUMBERS: pyarrow.list_(pyarrow.float64())}
    for name, (kind, values) in columns.items():
        array = pyarrow.array(_cells(kind, values), types[kind])
        if name in batch.column_names:
            batch = batch.set_column(batch.column_names.index(name), name, array)
        else:
            batch = batch.append_column(name, array)
    return batch


def _cells(kind: str, values: Sequence) -> list:
    """Return the values of a column with None for a row of NaN."""
    if kind == NUMBERS:
        return [None if np.isnan(row).any() else row.tolist() for row in values]
    return list(values)


_EXTEND = {"dict": _extend_dict, "pandas": _extend_frame, "pyarrow": _extend_arrow}
