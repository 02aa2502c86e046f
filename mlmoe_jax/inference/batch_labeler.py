"""Label the images of a table batch by batch, for engines that distribute it, such as Ray Data and Spark."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlmoe_jax.config.loading import Overrides
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import MixedImages
from mlmoe_jax.runtime.files import PathLike
from mlmoe_jax.runtime.text import abbreviate

if TYPE_CHECKING:
    from mlmoe_jax.inference.predictor import Predictor

ADDED = {"labels": "ARRAY<STRING>", "error": "STRING", "scores": "ARRAY<DOUBLE>"}  # columns, and their types in Spark
_opened: dict[str, Predictor] = {}  # the newest of this process, by `BatchLabeler.identity`


class BatchLabeler:
    """A function from a batch of a table with images to the batch with their labels.

    It holds only its arguments. The first batch in a process opens the model, which remains open there for all copies
    of this object: Spark makes a copy for each task. The model is compiled once, for `batch_size` images.

    Args:
      workdir, overrides: as in `Predictor.from_run`.
      column: the name of the column of images: paths, bytes of image files, arrays u8[h,w,3], Pillow images, or dicts
        with `bytes` or `path`, as of the datasets library.
      top_k: as in `Predictor.stream`.
      scores: whether to add the column of scores.
      batch_size: as in `Predictor.stream`. A batch can have any number of rows.
    """

    def __init__(
        self,
        workdir: PathLike,
        *,
        column: str = "image",
        top_k: int | None = None,
        scores: bool = True,
        batch_size: int = 32,
        overrides: Overrides = (),
    ):
        self.workdir, self.overrides = os.fspath(workdir), overrides
        self.column, self.top_k, self.batch_size = column, top_k, batch_size
        self.added = {name: kind for name, kind in ADDED.items() if scores or name != "scores"}
        self.identity = uuid.uuid4().hex

    @property
    def predictor(self) -> Predictor:
        """The predictor of this process. Raises UserError as `Predictor.from_run`, or if it assigns labels by ranks."""
        if self.identity not in _opened:
            from mlmoe_jax.inference.predictor import Predictor  # the process that distributes batches needs no JAX

            _opened.clear()  # before the next model is opened: memory need not hold both
            opened = Predictor.from_run(self.workdir, self.overrides)
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
          error: the reason why the image could not be read; "" if it was read.
          scores: f64[K] for each image, the probabilities in the order of `predictor.names`; NaN if it could not be
            read.

        Args:
          batch: a dict of lists or arrays, a pandas DataFrame, or a pyarrow Table or RecordBatch.

        Raises:
          UserError: as `predictor` and `Predictor.stream`; or the batch has no column of images, or a column with the
            name of an added one.
        """
        in_arrow = hasattr(batch, "column_names")
        names = batch.column_names if in_arrow else list(batch)
        self._require_columns(names)
        cells = batch[self.column]
        images = _Cells(cells.to_pylist() if in_arrow else cells)
        new = {self.column: images.paths, **self._label(images)}
        if in_arrow:
            kept = {name: batch[name] for name in names}
            return type(batch).from_pydict({**kept, **_to_arrow(new)})
        if isinstance(batch, Mapping):
            return {**batch, **{name: np.fromiter(values, object, len(values)) for name, values in new.items()}}
        return batch.assign(**new)

    def spark_schema(self, columns: Iterable[tuple[str, str]]) -> str:
        """Return the schema of the result in the DDL of Spark, for `mapInArrow` and `mapInPandas`.

        Args:
          columns: (name, type) of each column of the table, as the attribute `dtypes` of Spark's DataFrame.

        Raises:
          UserError: there is no column of images, or a column with the name of an added one.
        """
        types = dict(columns)
        self._require_columns(list(types))
        types |= {self.column: "STRING", **self.added}
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in types.items())

    def _require_columns(self, names: list[str]) -> None:
        if self.column not in names:
            raise UserError(f"there is no column {self.column!r} of images, only {abbreviate(names)}; give column=NAME")
        if taken := [name for name in self.added if name in names]:
            raise UserError(f"the table already has a column {taken[0]!r}, which would be replaced; rename it")

    def _label(self, images: _Cells) -> dict[str, list]:
        """Return the values of the added columns."""
        predictor = self.predictor
        results = list(predictor.stream(images, batch_size=self.batch_size, top_k=self.top_k))
        unknown = dict.fromkeys(predictor.names, float("nan"))
        values = {
            "labels": [list(result.labels) for result in results],
            "error": [result.error for result in results],
            "scores": [list((result.scores or unknown).values()) for result in results],
        }
        return {name: values[name] for name in self.added}


class _Cells(MixedImages):
    """The images of the cells of a column, and their `paths`, None for an image without one."""

    def __init__(self, cells: Iterable[Any]):
        images, self.paths = [], []
        for cell in cells:
            parts = cell if isinstance(cell, Mapping) else {"bytes": cell}
            path, image = parts.get("path"), parts.get("bytes")
            if image is None:
                image = path
            elif isinstance(image, str):
                path = image
            images.append(image)
            self.paths.append(path)
        super().__init__(images)

    def name(self, row: int) -> str:
        return self.paths[row] or "the cell"


def _to_arrow(columns: Mapping[str, list]) -> dict[str, Any]:
    import pyarrow

    text = pyarrow.string()
    types = {"labels": pyarrow.list_(text), "scores": pyarrow.list_(pyarrow.float64())}
    return {name: pyarrow.array(values, types.get(name, text)) for name, values in columns.items()}
