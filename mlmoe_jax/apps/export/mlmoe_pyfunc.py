"""Let MLflow load this exported folder: mlflow.pyfunc.load_model(FOLDER).predict(table).

The table has a column `image` with encoded image files (bytes) or a column `path`. The result has one column of
probabilities per label.
"""

from __future__ import annotations

import io
import runpy
from pathlib import Path
from typing import Any

import numpy as np

_BATCH = 32


class LabelTable:
    """The model of an exported folder, with a `predict` method for DataFrames of images."""

    def __init__(self, folder: str):
        self.model = runpy.run_path(str(Path(folder) / "load.py"))["Model"](folder)

    def predict(self, table: Any, params: dict[str, Any] | None = None) -> Any:
        """Return a DataFrame of probabilities with the index of `table` and one column per label.

        Args:
          table: a DataFrame with a column `image` of encoded files (bytes) or a column `path`, without missing values.
          params: ignored; MLflow passes it.
        """
        import pandas

        columns = [column for column in ("image", "path") if column in table and table[column].notna().all()]
        if len(columns) != 1:
            raise ValueError("the table should have one column, `image` with encoded files or `path`, without gaps")
        images = [io.BytesIO(image) if columns == ["image"] else image for image in table[columns[0]]]
        scores = np.empty((len(images), len(self.model.labels)), np.float32)
        for at in range(0, len(images), _BATCH):
            scores[at : at + _BATCH] = self.model([self.model.read(image) for image in images[at : at + _BATCH]])
        return pandas.DataFrame(scores, index=table.index, columns=self.model.labels)


def _load_pyfunc(path: str) -> LabelTable:
    return LabelTable(path)
